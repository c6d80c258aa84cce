"""Grouped matmuls: rows sorted by group, each group times its own weight.

PyTorch's kernel takes float32 and bfloat16 with rows of a multiple of 16 bytes, and group ends on the device, so the
host need not know them. Anything else (float64, other widths, releases without a CPU kernel) is computed group by
group, for which the host must know the sizes. A group may be empty.
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

_DTYPES = (torch.float32, torch.bfloat16)
_PUBLIC_GROUPED_MM: Any = getattr(F, "grouped_mm", None)  # since torch 2.12 or so
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """Where each group of rows ends; and their sizes, if the host knows them."""

    ends: Tensor  # int32 [G]
    sizes: Sizes | None = None

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device) -> "Groups":
        return cls(torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device), sizes)

    def group_of_rows(self, rows: int) -> Tensor:
        """int64 [N]: the group of each of `rows` rows."""
        return torch.searchsorted(self.ends, torch.arange(rows, dtype=torch.int32, device=self.ends.device), right=True)


DeferWgrad = Callable[[Callable[[], Tensor]], None]  # takes a function that computes the weight's gradient later


def add_bias(y: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """y [N, O] plus the bias of each row's group; `bias` is [G * O]."""
    return y if bias is None else y + bias.unflatten(0, (groups.ends.shape[0], -1))[groups.group_of_rows(y.shape[0])]


class GroupedLinear(Function):
    """y = x W_g^T for the rows of each group g. The weights are one matrix, [G * O, I]."""

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
    """The gradients that `backward` returns: of the input, by `product`; of the weight, now or deferred."""
    (x, weight, ends), sizes = ctx.saved_tensors, ctx.sizes
    gradient = gradient.contiguous()  # an expanded one (of a sum) has strides of 0, which the kernel refuses
    dx = product(gradient, weight.unflatten(0, (ends.shape[0], -1)), ends, sizes)
    if ctx.defer_wgrad is not None and (defer := ctx.defer_wgrad()) is not None:
        defer(lambda: weight_gradient(gradient, x, ends, sizes).flatten(0, 1))
        return dx, None, None, None, None
    return dx, weight_gradient(gradient, x, ends, sizes).flatten(0, 1), None, None, None


def product(x: Tensor, weights: Tensor, ends: Tensor, sizes: Sizes | None) -> Tensor:
    """x [N, I], weights [G, I, O] -> [N, O]."""
    if torch.compiler.is_compiling():  # blocks are compiled only if there is a kernel
        return _mm_in_graph(x, weights, ends)
    if _kernel_takes(x, *weights.shape[1:]):
        return _grouped_mm(x, weights, ends)
    return torch.cat([x[rows] @ weight for rows, weight in zip(_slices(ends, sizes), weights, strict=True)])


def weight_gradient(gradient: Tensor, x: Tensor, ends: Tensor, sizes: Sizes | None) -> Tensor:
    """gradient [N, O], x [N, I] -> [G, O, I]: zero where a group has no rows."""
    if torch.compiler.is_compiling():
        return _weight_gradient_in_graph(gradient, x, ends)
    if not _kernel_takes(x, gradient.shape[1], x.shape[1]):
        return torch.stack([gradient[rows].mT @ x[rows] for rows in _slices(ends, sizes)])
    return zero_empty_groups(_grouped_mm(gradient.mT, x, ends), ends, sizes)


# Custom operators in graphs: the compiler of torch 2.11 passes PyTorch's operator other strides than in eager mode,
# with which the kernel requires groups of a multiple of eight rows.
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
    """Zero the gradients of empty groups, [G, O, I], in place: the kernel may not write them."""
    if gradients.is_cuda:
        from fivefold.model import triton_kernels  # Triton's import takes a second

        return triton_kernels.zero_empty_groups(gradients, ends)
    if sizes is not None and all(sizes):
        return gradients
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return gradients.masked_fill_(empty[:, None, None], 0.0)


def _slices(ends: Tensor, sizes: Sizes | None) -> list[slice]:
    """The rows of each group; without `sizes` the host waits for the device."""
    return [slice(*pair) for pair in pairwise([0, *(ends.tolist() if sizes is None else accumulate(sizes))])]


def _kernel_takes(x: Tensor, *widths: int) -> bool:
    """Whether the kernel supports x and operands of these widths."""
    return x.shape[0] > 0 and has_kernel(x.device.type, x.dtype, *widths)


def has_kernel(device: str, dtype: torch.dtype, *widths: int) -> bool:
    """Whether PyTorch's kernel supports rows and weights of these widths."""
    if dtype not in _DTYPES or any(width * dtype.itemsize % 16 for width in widths):
        return False
    return _kernel_runs(device, dtype)


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """PyTorch's kernel, by the name that this release has for it."""
    return torch._grouped_mm(a, b, offs=ends) if _PUBLIC_GROUPED_MM is None else _PUBLIC_GROUPED_MM(a, b, offs=ends)


@cache
def _kernel_runs(device: str, dtype: torch.dtype) -> bool:
    """Whether the kernel runs here: tried once, since releases differ. Hidden from recompute modes, which count ops."""
    with torch.no_grad(), _disable_current_modes():
        x = torch.ones(16, 16, dtype=dtype, device=device)
        try:
            _grouped_mm(x, x[None], torch.tensor([16], dtype=torch.int32, device=device))
            _grouped_mm(x.mT, x, torch.tensor([16], dtype=torch.int32, device=device))
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
    return True
