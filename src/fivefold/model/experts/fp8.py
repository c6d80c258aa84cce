"""Experts whose products take 8-bit floats (e4m3), with a scale for every row and for every column of a weight.

    y = x W_g^T    rows of x and rows of W rounded, each by its own largest value
    dx = dy W_g    rows of dy, and columns of W: its rounding goes along what is summed, so it is another one
    dW = dy^T x    in bfloat16: it sums over tokens, and fast sums of 8-bit products over thousands of them lose norm

A row's scale does not depend on which rows lie beside it: what an expert says of a token is the same in every layout.
Sums are those of the tensor cores' fast mode; the other takes three times as long for narrow experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.model.experts.grouped import Sizes, both_gradients, product

_KIND = torch.float8_e4m3fn
_MOST = torch.finfo(_KIND).max


class Fp8GroupedLinear(Function):
    """As `GroupedLinear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, sizes: Sizes | None, put_off: Callable[[], Any] | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.sizes, ctx.put_off = sizes, put_off
        return fp8_product(x, weight.unflatten(0, (ends.shape[0], -1)).mT, ends, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return both_gradients(ctx, gradient, fp8_product)


def fp8_product(x: Tensor, weights: Tensor, ends: Tensor, sizes: Sizes | None) -> Tensor:
    """x [N, I], weights [G, I, O] -> [N, O]. Weights are rounded along what is summed."""
    (x8, x_by), (w8, w_by) = rounded(x), rounded(weights.mT.contiguous())
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


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., I] as 8-bit floats, and for every row [...] the factor that undoes its scale."""
    by = x.abs().amax(-1).float().clamp(min=1e-12) / _MOST
    return (x.float() / by[..., None]).clamp(-_MOST, _MOST).to(_KIND), by
