"""Grouped matmuls: rows that lie group by group, each group times a weight of its own.

PyTorch's kernel takes float32 and bfloat16 whose rows are multiples of 16 bytes; what it does not take (float64, odd
widths, releases without it on a CPU) is computed group by group. A group may be empty.
Shapes: N rows, G groups, I inputs, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

_KINDS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Groups:
    """How many rows each group has."""

    sizes: tuple[int, ...]
    device: torch.device

    @cached_property
    def ends(self) -> Tensor:
        """int32 [G]: where each group ends."""
        return torch.tensor(list(accumulate(self.sizes)), dtype=torch.int32, device=self.device)

    @cached_property
    def numbers(self) -> Tensor:
        """int64 [N]: the group of each row."""
        sizes = torch.tensor(self.sizes, device=self.device)
        return torch.arange(len(self.sizes), device=self.device).repeat_interleave(sizes, output_size=sum(self.sizes))

    @property
    def slices(self) -> list[slice]:
        return [slice(*pair) for pair in pairwise([0, *accumulate(self.sizes)])]


PutOff = Callable[[Callable[[], Tensor]], None]  # is given a function that computes the weight's gradient, for later


class GroupedLinear(Function):
    """y = x W_g^T for the rows of each group g. The weights lie one below the other: [G * O, I]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups, put_off: Callable[[], PutOff | None]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.put_off = groups, put_off
        return product(x, weight.unflatten(0, (len(groups.sizes), -1)).mT, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x, weight), groups = ctx.saved_tensors, ctx.groups
        gradient = gradient.contiguous()  # that of a sum has strides of 0, which the kernel refuses
        dx = product(gradient, weight.unflatten(0, (len(groups.sizes), -1)), groups)
        if (later := ctx.put_off()) is not None:
            later(lambda: weight_gradient(gradient, x, groups).flatten(0, 1))
            return dx, None, None, None
        return dx, weight_gradient(gradient, x, groups).flatten(0, 1), None, None


def product(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """x [N, I], weights [G, I, O] -> [N, O]."""
    if _has_kernel(x, *weights.shape[1:]):
        return _kernel()(x, weights, groups.ends)
    return torch.cat([x[rows] @ weight for rows, weight in zip(groups.slices, weights, strict=True)])


def weight_gradient(gradient: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """gradient [N, O], x [N, I] -> [G, O, I]: zero where a group has no rows."""
    if _has_kernel(x, gradient.shape[1], x.shape[1]):
        found = _kernel()(gradient.mT, x, groups.ends)
        empty = [number for number, size in enumerate(groups.sizes) if not size]
        if empty:  # the kernel need not write them
            found[empty] = 0.0
        return found
    return torch.stack([gradient[rows].mT @ x[rows] for rows in groups.slices])


def _has_kernel(x: Tensor, *widths: int) -> bool:
    """Whether the kernel takes rows like these, there being some, where its operands have these widths."""
    if x.dtype not in _KINDS or x.shape[0] == 0 or not _runs(x.device.type, x.dtype):
        return False
    return not any(width * x.element_size() % 16 for width in widths)


@cache
def _kernel() -> Callable[..., Tensor]:
    """(a, b, ends): public since torch 2.12 or so."""
    public: Any = getattr(F, "grouped_mm", None)
    if public is not None:
        return lambda a, b, ends: public(a, b, offs=ends)
    return lambda a, b, ends: torch._grouped_mm(a, b, offs=ends)


@cache
def _runs(device: str, dtype: torch.dtype) -> bool:
    """Tried once: releases differ. Unseen by recomputation, which counts the products of a block."""
    with torch.no_grad(), _disable_current_modes():
        x = torch.ones(16, 16, dtype=dtype, device=device)
        try:
            _kernel()(x, x[None], torch.tensor([16], dtype=torch.int32, device=device))
            _kernel()(x.mT, x, torch.tensor([16], dtype=torch.int32, device=device))
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
    return True
