"""Weights of released files with fewer than 16 bits, as the numbers they stand for.

MXFP4  gpt-oss: 32 numbers of a row share a power of two; each is one of the 16 of e2m1 (OCP Microscaling Formats
       Specification 1.0, section 5.3), two in a byte, the low four bits first
FP8    DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), Kimi K2: e4m3, and a float32 for each tile of 128 x 128
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.support.errors import UserError

BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of e8m0, a power of two in a byte

Tile = tuple[int, int]


def tile(directory: Path, config: Any) -> Tile | None:
    """The tile of FP8 weights that a `quantization_config` means; None: it means none. What is unknown is refused."""
    match config:
        case None | {"quant_method": "mxfp4"}:
            return None
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if min(rows, columns) > 0:
            return rows, columns
    raise UserError(
        f"{directory} is quantised in a way that is not read ({config}); mxfp4 is, and fp8 with weight_block_size; or "
        "import the weights that it was made of"
    )


def tiles(shape: tuple[int, ...], tile: Tile) -> tuple[int, ...]:
    """The shape of the scales of a matrix; the last tiles may be narrower."""
    return tuple(-(-size // each) for size, each in zip(shape, tile, strict=True))


def fp8(numbers: Tensor, scales: Tensor, box: tuple[slice, ...], tile: Tile) -> Tensor:
    """A box of a matrix, of which `numbers` are this part and `scales` are all."""
    rows, columns = (
        torch.arange(side.start or 0, (side.start or 0) + size) // each
        for side, size, each in zip(box, numbers.shape, tile, strict=True)
    )
    return numbers.to(torch.float32) * scales.to(torch.float32)[rows][:, columns]


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., n, 16] and scales [..., n] of bytes -> float32 [..., n * 32]."""
    table = torch.tensor([*_E2M1, *(-one for one in _E2M1)])
    numbers = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).long()].flatten(-2)
    return torch.ldexp(numbers, scales[..., None].int() - _BIAS).flatten(-2)


def unblocked(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what `blocks` of this shape stand for."""
    return (*shape[:-2], shape[-2] * 2 * shape[-1]) if len(shape) > 1 else shape
