"""Dequantises the weights of published files with fewer than 16 bits.

MXFP4  gpt-oss: 32 numbers of a row share a power of two; each is one of the 16 values of e2m1 (OCP Microscaling
       Formats Specification 1.0, section 5.3), two in a byte, the low four bits first
FP8    DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), Kimi K2: e4m3, and a float32 scale for each tile of 128 x 128
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.support.errors import UserError

MXFP4_BLOCK = 32  # numbers that share a scale in MXFP4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127  # of e8m0, a power of two in a byte

Tile = tuple[int, int]  # rows and columns that share a scale in FP8


def fp8_tile(directory: Path, config: Any) -> Tile | None:
    """The tile of FP8 weights by a `quantization_config`; None without FP8. UserError for an unknown quantisation."""
    match config:
        case None | {"quant_method": "mxfp4"}:
            return None
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if min(rows, columns) > 0:
            return rows, columns
    raise UserError(
        f"{directory} is quantised in a way that is not read ({config}); mxfp4 is, and fp8 with weight_block_size; or "
        "import the weights that it was made of",
        "hf.quantised",
    )


def scales_shape(shape: tuple[int, ...], tile: Tile) -> tuple[int, ...]:
    """The shape of the scales of a matrix; the last tiles may be narrower."""
    return tuple(-(-size // tile_size) for size, tile_size in zip(shape, tile, strict=True))


def dequantise_fp8(numbers: Tensor, scales: Tensor, box: tuple[slice, ...], tile: Tile) -> Tensor:
    """A dequantised box of a matrix: `numbers` are of the box, and `scales` of the full matrix."""
    rows, columns = (  # indices of scales
        torch.arange(side.start or 0, (side.start or 0) + size) // tile_size
        for side, size, tile_size in zip(box, numbers.shape, tile, strict=True)
    )
    return numbers.to(torch.float32) * scales.to(torch.float32)[rows][:, columns]


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., n, 16] and scales [..., n] of bytes -> float32 [..., n * 32]."""
    table = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    numbers = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).long()].flatten(-2)
    return torch.ldexp(numbers, scales[..., None].int() - _E8M0_BIAS).flatten(-2)


def dequantised_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the dequantised tensor whose `blocks` have this shape."""
    return (*shape[:-2], shape[-2] * 2 * shape[-1]) if len(shape) > 1 else shape
