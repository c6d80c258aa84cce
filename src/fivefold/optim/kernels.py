"""AdamW on a GPU in one pass over memory: clipping, both moments, the master, and the model's low-precision copy of it.

PyTorch's fused AdamW computes moments and master. Scaling the gradients before it and rounding the weights after it
would read and write them all once more, which takes a tenth of a step of one microbatch. The arithmetic is
torch.optim.AdamW's, in float32.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _update(
    master, gradient, first, second, weight, scale, size, decay_factor, step_size, correction, beta1, beta2, eps,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    g = tl.load(gradient + offsets, mask=mask).to(tl.float32) * tl.load(scale)
    m = tl.load(first + offsets, mask=mask)
    v = tl.load(second + offsets, mask=mask)
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    p = tl.load(master + offsets, mask=mask) * decay_factor
    p = p - step_size * (m / (tl.sqrt(v) / correction + eps))
    tl.store(first + offsets, m, mask=mask)
    tl.store(second + offsets, v, mask=mask)
    tl.store(master + offsets, p, mask=mask)
    if ROUNDS:
        tl.store(weight + offsets, p.to(weight.dtype.element_ty), mask=mask)


def adamw(
    master: Tensor,
    moments: Sequence[Tensor],
    scale: Tensor,
    compute_copy: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    lr: float,
    decay: float,
    step: int,
) -> None:
    """Update one float32 parameter in place, as step number `step` (from 1), with its gradient times `scale`."""
    beta1, beta2 = betas
    size, gradient = master.numel(), master.grad
    assert gradient is not None
    assert all(
        x.is_contiguous() for x in (master, gradient, *moments, master if compute_copy is None else compute_copy)
    )
    decay_factor, step_size, correction = 1 - lr * decay, lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    _update[(triton.cdiv(size, _BLOCK),)](
        master, gradient, *moments, compute_copy if compute_copy is not None else master, scale, size,
        decay_factor, step_size, correction, beta1, beta2, eps, ROUNDS=compute_copy is not None, BLOCK=_BLOCK,
    )  # fmt: skip


# ---- fused norm -----------------------------------------------------------------------------------------------------
# The sum of squares of a gradient on a GPU, in float64, at the speed of its memory.
#
# PyTorch's foreach norms read a GPU's memory at half its speed. Which elements a program sums is fixed, so the sum is
# deterministic.


_NORM_BLOCK, _PART = 4096, 1 << 15  # elements read at a time, and by a program


@triton.jit
def _squares(x, sums, size, KIND: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=KIND)
    for first in tl.static_range(0, PART, BLOCK):
        offsets = program * PART + first + tl.arange(0, BLOCK)
        value = tl.load(x + offsets, mask=offsets < size, other=0.0).to(KIND)
        total += value * value
    tl.store(sums + program, tl.sum(total.to(tl.float64)))


def takes(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) and x.is_contiguous() and x.numel() > 0


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum over all elements of these tensors; `takes` must be true of each."""
    programs = [triton.cdiv(x.numel(), _PART) for x in tensors]
    sums = torch.empty(sum(programs), dtype=torch.float64, device=tensors[0].device)
    first = 0
    for x, count in zip(tensors, programs, strict=True):
        # A bfloat16's square has sixteen bits, and sums of eight lose nothing in float32 that a norm would show. Above
        # 1.8e19 it is infinite, as no gradient of a run that goes on is; below 1e-19 it is nothing.
        kind = tl.float32 if x.dtype == torch.bfloat16 else tl.float64
        _squares[(count,)](x, sums[first:], x.numel(), KIND=kind, BLOCK=_NORM_BLOCK, PART=_PART, num_warps=8)
        first += count
    return sums.sum()
