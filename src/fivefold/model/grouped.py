"""Grouped matmuls: rows that lie group by group, each group times a weight of its own.

PyTorch's kernel takes float32 and bfloat16 whose rows are multiples of 16 bytes, and reads on the device where a group
ends: the host need not know. What it does not take (float64, odd widths, releases without it on a CPU) is computed
group by group, and there the host must. A group may be empty.
Shapes: N rows, G groups, I inputs, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

_KINDS = (torch.float32, torch.bfloat16)
_PUBLIC: Any = getattr(F, "grouped_mm", None)  # since torch 2.12 or so
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """Where each group of rows ends; how many it has, where the host knows."""

    ends: Tensor  # int32 [G]
    sizes: Sizes | None = None

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device) -> "Groups":
        return cls(torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device), sizes)

    def numbers(self, rows: int) -> Tensor:
        """int64 [N]: the group of each of `rows` rows."""
        return torch.searchsorted(self.ends, torch.arange(rows, dtype=torch.int32, device=self.ends.device), right=True)


DeferWgrad = Callable[
    [Callable[[], Tensor]], None
]  # is given a function that computes the weight's gradient, for later


def add_bias(y: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """y [N, O] and the bias of each row's group; biases lie one below the other, [G * O]."""
    return y if bias is None else y + bias.unflatten(0, (groups.ends.shape[0], -1))[groups.numbers(y.shape[0])]


class GroupedLinear(Function):
    """y = x W_g^T for the rows of each group g. Weights lie one below the other, [G * O, I]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, sizes: Sizes | None, defer_wgrad: Callable[[], Any] | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.sizes, ctx.defer_wgrad = sizes, defer_wgrad
        return product(x, weight.unflatten(0, (ends.shape[0], -1)).mT, ends, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return grouped_backward(ctx, gradient, product)


def grouped_backward(ctx: Any, gradient: Tensor, product: Callable[..., Tensor]) -> tuple[Any, ...]:
    """What `backward` returns: of the input by `product`, of the weight now or deferred."""
    (x, weight, ends), sizes = ctx.saved_tensors, ctx.sizes
    gradient = gradient.contiguous()  # that of a sum has strides of 0, which the kernel refuses
    dx = product(gradient, weight.unflatten(0, (ends.shape[0], -1)), ends, sizes)
    if ctx.defer_wgrad is not None and (defer := ctx.defer_wgrad()) is not None:
        defer(lambda: weight_gradient(gradient, x, ends, sizes).flatten(0, 1))
        return dx, None, None, None, None
    return dx, weight_gradient(gradient, x, ends, sizes).flatten(0, 1), None, None, None


def product(x: Tensor, weights: Tensor, ends: Tensor, sizes: Sizes | None) -> Tensor:
    """x [N, I], weights [G, I, O] -> [N, O]."""
    if torch.compiler.is_compiling():  # a graph is made only where there is a kernel
        return _mm_in_graph(x, weights, ends)
    if _takes(x, *weights.shape[1:]):
        return _grouped_mm(x, weights, ends)
    return torch.cat([x[rows] @ weight for rows, weight in zip(_slices(ends, sizes), weights, strict=True)])


def weight_gradient(gradient: Tensor, x: Tensor, ends: Tensor, sizes: Sizes | None) -> Tensor:
    """gradient [N, O], x [N, I] -> [G, O, I]: zero where a group has no rows."""
    if torch.compiler.is_compiling():
        return _weight_gradient_in_graph(gradient, x, ends)
    if not _takes(x, gradient.shape[1], x.shape[1]):
        return torch.stack([gradient[rows].mT @ x[rows] for rows in _slices(ends, sizes)])
    return zero_empty_groups(_grouped_mm(gradient.mT, x, ends), ends, sizes)


# Operators of our own in graphs: the compiler of torch 2.11 hands PyTorch's other strides than it was given, with which
# the kernel asks for groups of eight rows.
@torch.library.custom_op("fivefold::grouped_mm", mutates_args=())
def _mm_in_graph(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _grouped_mm(x.contiguous(), weights, ends)


@_mm_in_graph.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[2])


@torch.library.custom_op("fivefold::grouped_weight_gradient", mutates_args=())
def _weight_gradient_in_graph(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return zero_empty_groups(_grouped_mm(gradient.contiguous().mT, x.contiguous(), ends), ends, None)


@_weight_gradient_in_graph.register_fake
def _(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], gradient.shape[1], x.shape[1])


def zero_empty_groups(gradients: Tensor, ends: Tensor, sizes: Sizes | None) -> Tensor:
    """[G, O, I], in place: the kernel need not write where a group has no rows."""
    if gradients.is_cuda:
        from fivefold.model import grouped_triton  # Triton's import takes a second

        return grouped_triton.zero_empty_groups(gradients, ends)
    if sizes is not None and all(sizes):
        return gradients
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return gradients.masked_fill_(empty[:, None, None], 0.0)


def _slices(ends: Tensor, sizes: Sizes | None) -> list[slice]:
    return [slice(*pair) for pair in pairwise([0, *(ends.tolist() if sizes is None else accumulate(sizes))])]


def _takes(x: Tensor, *widths: int) -> bool:
    """Whether the kernel takes rows like these, there being some, where its operands have these widths."""
    return x.shape[0] > 0 and has_kernel(x.device.type, x.dtype, *widths)


def has_kernel(device: str, dtype: torch.dtype, *widths: int) -> bool:
    """Whether PyTorch's kernel multiplies rows and weights of these widths."""
    if dtype not in _KINDS or any(width * dtype.itemsize % 16 for width in widths):
        return False
    return _runs(device, dtype)


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(a, b, offs=ends) if _PUBLIC is None else _PUBLIC(a, b, offs=ends)


@cache
def _runs(device: str, dtype: torch.dtype) -> bool:
    """Tried once: releases differ. Unseen by recomputation, which counts the products of a block."""
    with torch.no_grad(), _disable_current_modes():
        x = torch.ones(16, 16, dtype=dtype, device=device)
        try:
            _grouped_mm(x, x[None], torch.tensor([16], dtype=torch.int32, device=device))
            _grouped_mm(x.mT, x, torch.tensor([16], dtype=torch.int32, device=device))
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
    return True
