"""Norms whose weights are wider than what they norm: computed in the weights' dtype, and rounded once, at the end."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def normed(norm: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., E] as `norm` says, by parameters that are given, because ranks may share them."""
    if x.dtype == weight.dtype:
        return _plain(norm, x, weight, bias)
    if torch.compiler.is_compiling():  # a graph fuses the casts, and keeps what is narrow
        return _plain(norm, x.to(weight.dtype), weight, bias).to(x.dtype)
    return Widened.apply(norm, x, weight, bias)


def _plain(norm: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
    assert isinstance(norm, nn.RMSNorm)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


class Widened(Function):
    """Keeps x as it is for the backward pass, which widens it again: a wide copy would be twice as large."""

    @staticmethod
    def forward(ctx: Any, norm: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(x, weight, bias)
        return _plain(norm, x.to(weight.dtype), weight, bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [None if one is None else one.detach().requires_grad_() for one in (weight, bias)]
            wide = x.detach().to(weight.dtype).requires_grad_()
            y = _plain(ctx.norm, wide, *inputs)  # type: ignore[arg-type]
        learned = [wide, *(one for one in inputs if one is not None)]
        dx, *rest = torch.autograd.grad(y, learned, gradient.to(weight.dtype))
        return None, dx.to(x.dtype), *rest, *[None] * (2 - len(rest))
