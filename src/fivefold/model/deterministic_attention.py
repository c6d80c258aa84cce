"""Causal attention that gives the same bits every time, on a GPU: FlexAttention's kernels, inside a compiled block.

cuDNN's backward pass, the fastest, adds up in whatever order its blocks arrive; flash attention 2's takes more than
twice as long with its order fixed. FlexAttention's order is fixed by construction, and is in between (docs/speed.md).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fivefold.model.attention import HALF

_SIDE = 128  # of a tile
_WIDTHS = (64, 128)  # of heads, for which there are tuned kernels


@dataclass(frozen=True)
class Tiles:
    """Which tiles of the scores of a whole row are looked at."""

    length: int
    mask: Any  # a BlockMask; its module brings the compiler along, and is imported when it is asked for


def wanted(device: torch.device, length: int) -> bool:
    return device.type == "cuda" and length % _SIDE == 0 and torch.are_deterministic_algorithms_enabled()


@lru_cache(maxsize=4)
def causal(device: torch.device, length: int) -> Tiles:
    """Below the diagonal a tile is seen whole. Told tile by tile: to look at every score would take gigabytes."""
    from torch.nn.attention.flex_attention import BlockMask

    here = torch.arange(length // _SIDE, dtype=torch.int32, device=device)
    row = here.expand(1, 1, len(here), -1).contiguous()
    itself = (row + here[:, None]) % len(here)  # first the tile on the diagonal; the others do not count
    one = torch.ones_like(here)[None, None]
    return Tiles(length, BlockMask.from_kv_blocks(one, itself, here[None, None], row, _SIDE, _sees))


def _sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def fit(q: Tensor, tiles: Tiles) -> bool:
    """Whether `attend` takes it. Outside of a compiled block FlexAttention would hold all scores."""
    known = q.dtype in HALF and q.shape[-1] in _WIDTHS and q.shape[2] == tiles.length
    return known and torch.compiler.is_compiling()


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Tensor:
    """q [B, H, S, D], k and v [B, K, S, D] -> [B, H, S, D]"""
    from torch.nn.attention.flex_attention import flex_attention

    seen = flex_attention(q, k, v, block_mask=tiles.mask, enable_gqa=k.shape[1] < q.shape[1])
    assert isinstance(seen, Tensor)
    return seen
