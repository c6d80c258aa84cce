"""The sum of squares of a gradient on a GPU, in float64, at the speed of its memory.

PyTorch's norms of many tensors read a GPU's memory at half its speed. Programs sum parts that do not depend on who is
quicker, so the sum is the same every time.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _PART = 4096, 1 << 15  # elements read at a time, and by a program


@triton.jit
def _squares(x, sums, size, KIND: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=KIND)
    for first in tl.static_range(0, PART, BLOCK):
        at = program * PART + first + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size, other=0.0).to(KIND)
        total += value * value
    tl.store(sums + program, tl.sum(total.to(tl.float64)))


def takes(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) and x.is_contiguous() and x.numel() > 0


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of all elements of these tensors, each of which `takes` must take."""
    programs = [triton.cdiv(x.numel(), _PART) for x in tensors]
    sums = torch.empty(sum(programs), dtype=torch.float64, device=tensors[0].device)
    first = 0
    for x, count in zip(tensors, programs, strict=True):
        # A bfloat16's square has sixteen bits, and sums of eight lose nothing in float32 that a norm would show. Above
        # 1.8e19 it is infinite, as no gradient of a run that goes on is; below 1e-19 it is nothing.
        kind = tl.float32 if x.dtype == torch.bfloat16 else tl.float64
        _squares[(count,)](x, sums[first:], x.numel(), KIND=kind, BLOCK=_BLOCK, PART=_PART, num_warps=8)
        first += count
    return sums.sum()
