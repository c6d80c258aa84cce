"""Linears whose matmuls take 8-bit floats: values in e4m3, gradients in e5m2, one scale per tensor, found as it comes.

    y = x W^T      x and W rounded to e4m3, times what makes their largest value the format's largest
    dx = dy W      dy rounded to e5m2, which has the range of gradients
    dW = dy^T x

Forward sums are those of the tensor cores' fast mode, which has fewer bits than float32. Gradients are summed in
float32: fast sums over 16,384 tokens made a gradient's norm 8% smaller. All come out in bfloat16. Masters, norms,
attention, the residual stream, the head and the loss stay as they are. What is kept for the backward pass is the
rounded input: half the bytes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

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
