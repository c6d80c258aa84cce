"""Linears whose matmuls take 8-bit floats: values in e4m3, gradients in e5m2, one dynamic scale per tensor.

    y = x W^T      x and W cast to e4m3, scaled so that their largest value is the format's largest
    dx = dy W      dy cast to e5m2, which has the range of gradients
    dW = dy^T x

Forward sums use the tensor cores' fast mode, which has fewer bits than float32. Gradients are summed in
float32: fast sums over 16,384 tokens made a gradient's norm 8% smaller. All come out in bfloat16. Masters, norms,
attention, the residual stream, the head and the loss are not affected. The 8-bit input is saved for the backward pass:
half the bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.model.grouped import Sizes, grouped_backward, product

VALUES, GRADS = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = Fp8Product.apply(x, weight)
    return y if bias is None else y + bias


class Fp8Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = to_fp8(x.flatten(0, -2), VALUES)
        w8, w_scale = to_fp8(weight, VALUES)
        ctx.save_for_backward(x8, x_scale, weight, w_scale)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return _product(x8, x_scale, w8.t(), w_scale, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight, w_scale = ctx.saved_tensors
        w8 = _divide(weight, w_scale, VALUES)  # cast again: a saved copy would outlive the weight that ZeRO 3 gathered
        dy8, dy_scale = to_fp8(grad.flatten(0, -2), GRADS)
        dx = _product(dy8, dy_scale, _column_major(w8), w_scale, ctx.dtype)
        dw = _product(dy8.t().contiguous(), dy_scale, _column_major(x8), x_scale, ctx.dtype)
        return dx.view(ctx.shape), dw


def to_fp8(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """x as 8-bit floats, and the scale to multiply them by."""
    inverse = torch.finfo(kind).max / x.abs().amax().float().clamp(min=1e-12)
    return _divide(x, inverse.reciprocal(), kind), inverse.reciprocal()


def _divide(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """x / scale, clamped to the format's range."""
    largest = torch.finfo(kind).max
    return (x.float() / scale).clamp(-largest, largest).to(kind)


def _column_major(x: Tensor) -> Tensor:
    """x in column-major order, as the matmuls require of their second operand."""
    return x.t().contiguous().t()


def _product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`fast`: sums have fewer bits than float32."""
    if a.is_cuda:
        return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
    return ((a.float() @ b.float()) * (a_scale * b_scale)).to(dtype)


# ---- experts --------------------------------------------------------------------------------------------------------
# Experts whose products take 8-bit floats (e4m3), with a scale for every row and for every column of a weight.
#
#     y = x W_g^T    rows of x and rows of W cast, each with a scale of its own
#     dx = dy W_g    rows of dy and columns of W: scales are along the dimension that is summed, so W is cast again
#     dW = dy^T x    in bfloat16: it sums over tokens, and fast sums of 8-bit products over thousands of them lose norm
#
# A row's scale does not depend on the other rows: an expert's output for a token is the same in every layout. Sums are
# those of the tensor cores' fast mode; the other takes three times as long for narrow experts.


_E4M3_MAX = torch.finfo(VALUES).max


class Fp8GroupedLinear(Function):
    """`GroupedLinear` with 8-bit products."""

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
        return grouped_backward(ctx, gradient, fp8_product)


def fp8_product(x: Tensor, weights: Tensor, ends: Tensor, sizes: Sizes | None) -> Tensor:
    """x [N, I], weights [G, I, O] -> [N, O]. Scales of weights are along the dimension that is summed."""
    (x8, x_scale), (w8, w_scale) = round_rows(x), round_rows(weights.mT.contiguous())
    if x.is_cuda and x.shape[0]:
        return _kernel(x8, w8, x_scale, w_scale, ends, x.dtype)
    operands = (x8.float() * x_scale[:, None], (w8.float() * w_scale[..., None]).mT)
    return product(*operands, ends, sizes).to(x.dtype)


# An operator of our own: see `grouped.py`.
@torch.library.custom_op("fivefold::fp8_grouped_mm", mutates_args=())
def _kernel(x: Tensor, weights: Tensor, x_scale: Tensor, w_scale: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    operands = x.contiguous(), weights.contiguous().mT, x_scale.contiguous(), w_scale.contiguous()
    return torch._scaled_grouped_mm(*operands, offs=ends, out_dtype=dtype, use_fast_accum=True)


@_kernel.register_fake
def _(x: Tensor, weights: Tensor, x_scale: Tensor, w_scale: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1], dtype=dtype)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., I] as 8-bit floats, and the scale [...] of every row."""
    scale = x.abs().amax(-1).float().clamp(min=1e-12) / _E4M3_MAX
    return (x.float() / scale[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX).to(VALUES), scale
