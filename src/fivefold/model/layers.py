"""The small parts of a decoder: dtypes of sums, positions of tokens, linears, activations and norms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of masters, of sums of gradients, losses and attention, for a model that computes in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- positions ------------------------------------------------------------------------------------------------------
# TokenPositions: where the tokens of a batch stand. What a layer knows of its surroundings, it knows from here.


@dataclass(frozen=True)
class TokenPositions:
    """Shapes: B sequences of S tokens. A rank that holds a slice of a sequence gets a slice of these."""

    position_ids: Tensor  # [B, S] within the sequence
    samples: Tensor  # [B] global sample index: with the position it keys dropout
    length: int  # of a whole sequence; positions are below it
    documents: Tensor | None = None  # [B, S] attention stays within equal numbers; None: one document per sequence
    row_documents: Tensor | None = None  # [B, length] of whole sequences, on the CPU, where tokens are a slice of them
    real: int | None = None  # sequences, the first ones; those behind only fill a batch up. None: all

    @classmethod
    def of(cls, tokens: Tensor) -> Self:
        """Whole sequences that start at position 0, of no particular sample."""
        batch, seq = tokens.shape
        positions = torch.arange(seq, device=tokens.device).expand(batch, seq)
        return cls(positions, torch.zeros(batch, dtype=torch.int64, device=tokens.device), seq)

    def mask(self, window: int = 0) -> Tensor | None:
        """Who may look at whom, [B, 1, S, S], no further back than a window; None means plain causal, which the kernels
        do without a mask."""
        if self.documents is None and not window:
            return None
        distance = self.position_ids[:, :, None] - self.position_ids[:, None, :]
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        if self.documents is not None:
            seen = seen & (self.documents[:, :, None] == self.documents[:, None, :])
        return seen[:, None]

    def host_documents(self) -> NDArray[np.integer] | None:
        """Of whole rows, for what is found on the host; without `row_documents` a device has to wait for it."""
        if self.row_documents is not None:
            return self.row_documents.numpy()
        return None if self.documents is None else self.documents.cpu().numpy()


# ---- linear ---------------------------------------------------------------------------------------------------------
# A linear that costs nothing to make on the meta device.


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """On the meta device there is nothing to draw, and torch imports its compiler to draw it."""
        if not self.weight.is_meta:
            super().reset_parameters()


# ---- activations ----------------------------------------------------------------------------------------------------
# The activations of feed-forward networks, dense ones and experts'. A gated one takes gate and input.


CLAMP = 7.0  # swiglu_limit of gpt-oss


def gated(name: str) -> bool:
    return name.startswith("swiglu")


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """arXiv 2002.05202."""
    return F.silu(gate) * up


def _swiglu_clamped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: the gate is bounded above, the input on both sides; 1.702 makes the sigmoid a GELU's."""
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": _swiglu,
    "swiglu_clamped": _swiglu_clamped,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


# ---- norms ----------------------------------------------------------------------------------------------------------
# Norms whose weights are more precise than their input: computed in the weights' dtype, and rounded once, at the end.


def normed(norm: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., E] as `norm` says, by parameters that are given, because ranks may share them."""
    if x.dtype == weight.dtype:
        return _plain(norm, x, weight, bias)
    if torch.compiler.is_compiling():  # a graph fuses the casts, and keeps what is small
        return _plain(norm, x.to(weight.dtype), weight, bias).to(x.dtype)
    return UpcastNorm.apply(norm, x, weight, bias)


def _plain(norm: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
    assert isinstance(norm, nn.RMSNorm)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


class UpcastNorm(Function):
    """Keeps x as it is for the backward pass, which casts it again: the upcast copy would be twice as large."""

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
            params = [None if param is None else param.detach().requires_grad_() for param in (weight, bias)]
            x_upcast = x.detach().to(weight.dtype).requires_grad_()
            y = _plain(ctx.norm, x_upcast, *params)  # type: ignore[arg-type]
        inputs = [x_upcast, *(param for param in params if param is not None)]
        dx, *rest = torch.autograd.grad(y, inputs, gradient.to(weight.dtype))
        return None, dx.to(x.dtype), *rest, *[None] * (2 - len(rest))
