"""Linears whose matmuls take 8-bit floats: values in e4m3, gradients in e5m2, one scale per tensor, found as it comes.

    y = x W^T      x and W rounded to e4m3, times what makes their largest value the format's largest
    dx = dy W      dy rounded to e5m2, which has the range of gradients
    dW = dy^T x

Forward sums are those of the tensor cores' fast mode, which has fewer bits than float32. Gradients are summed in
float32: fast sums over 16,384 tokens made a gradient's norm 8% smaller. All come out in bfloat16. Masters, norms,
attention, the residual stream, the head and the loss stay as they are. What is kept for the backward pass is the
rounded input: half the bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.model.grouped import Sizes, both_gradients, product

VALUES, GRADS = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = Fp8Product.apply(x, weight)
    return y if bias is None else y + bias


class Fp8Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        flat, by = rounded(x.flatten(0, -2), VALUES)
        narrow, weight_by = rounded(weight, VALUES)
        ctx.save_for_backward(flat, by, weight, weight_by)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return _product(flat, by, narrow.t(), weight_by, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        flat, by, weight, weight_by = ctx.saved_tensors
        narrow = _narrow(weight, weight_by, VALUES)  # again: a copy of it would outlive the weight that ZeRO 3 gathered
        dy, dy_by = rounded(grad.flatten(0, -2), GRADS)
        dx = _product(dy, dy_by, _columns(narrow), weight_by, ctx.dtype)
        dw = _product(dy.t().contiguous(), dy_by, _columns(flat), by, ctx.dtype)
        return dx.view(ctx.shape), dw


def rounded(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """x as 8-bit floats, and the factor that undoes their scale."""
    most = torch.finfo(kind).max
    by = most / x.abs().amax().float().clamp(min=1e-12)
    return _narrow(x, by.reciprocal(), kind), by.reciprocal()


def _narrow(x: Tensor, by: Tensor, kind: torch.dtype) -> Tensor:
    """x / by, which has the format's range."""
    most = torch.finfo(kind).max
    return (x.float() / by).clamp(-most, most).to(kind)


def _columns(x: Tensor) -> Tensor:
    """The same matrix, a column after the other: as the matmuls want their second factor."""
    return x.t().contiguous().t()


def _product(a: Tensor, a_by: Tensor, b: Tensor, b_by: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    if a.is_cuda:
        return torch._scaled_mm(a, b, scale_a=a_by, scale_b=b_by, out_dtype=dtype, use_fast_accum=fast)
    return ((a.float() @ b.float()) * (a_by * b_by)).to(dtype)


# ---- fp8 ------------------------------------------------------------------------------------------------------------
# Experts whose products take 8-bit floats (e4m3), with a scale for every row and for every column of a weight.
#
#     y = x W_g^T    rows of x and rows of W rounded, each by its own largest value
#     dx = dy W_g    rows of dy, and columns of W: its rounding goes along what is summed, so it is another one
#     dW = dy^T x    in bfloat16: it sums over tokens, and fast sums of 8-bit products over thousands of them lose norm
#
# A row's scale does not depend on which rows lie beside it: what an expert says of a token is the same in every
# layout. Sums are those of the tensor cores' fast mode; the other takes three times as long for narrow experts.


_KIND = torch.float8_e4m3fn
_MOST = torch.finfo(_KIND).max


class Fp8GroupedLinear(Function):
    """As `GroupedLinear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, sizes: Sizes | None, defer_wgrad: Callable[[], Any] | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.sizes, ctx.defer_wgrad = sizes, defer_wgrad
        return fp8_product(x, weight.unflatten(0, (ends.shape[0], -1)).mT, ends, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return both_gradients(ctx, gradient, fp8_product)


def fp8_product(x: Tensor, weights: Tensor, ends: Tensor, sizes: Sizes | None) -> Tensor:
    """x [N, I], weights [G, I, O] -> [N, O]. Weights are rounded along what is summed."""
    (x8, x_by), (w8, w_by) = round_rows(x), round_rows(weights.mT.contiguous())
    if x.is_cuda and x.shape[0]:
        return _kernel(x8, w8, x_by, w_by, ends, x.dtype)
    exact = (x8.float() * x_by[:, None], (w8.float() * w_by[..., None]).mT)
    return product(*exact, ends, sizes).to(x.dtype)


# An operator of our own: see `grouped.py`.
@torch.library.custom_op("fivefold::fp8_grouped_mm", mutates_args=())
def _kernel(x: Tensor, weights: Tensor, x_by: Tensor, weights_by: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    operands = x.contiguous(), weights.contiguous().mT, x_by.contiguous(), weights_by.contiguous()
    return torch._scaled_grouped_mm(*operands, offs=ends, out_dtype=dtype, use_fast_accum=True)


@_kernel.register_fake
def _(x: Tensor, weights: Tensor, x_by: Tensor, weights_by: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1], dtype=dtype)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., I] as 8-bit floats, and for every row [...] the factor that undoes its scale."""
    by = x.abs().amax(-1).float().clamp(min=1e-12) / _MOST
    return (x.float() / by[..., None]).clamp(-_MOST, _MOST).to(_KIND), by
