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
    """The dtype of masters, and in which gradients, losses and attention are accumulated, if compute is in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- positions ------------------------------------------------------------------------------------------------------
# TokenPositions: position, sample and document of the tokens of a batch; all that a layer knows of its context.


@dataclass(frozen=True)
class TokenPositions:
    """Shapes: B sequences of S tokens. A rank that holds a slice of a sequence gets a slice of these."""

    position_ids: Tensor  # [B, S] within the sequence
    samples: Tensor  # [B] global sample index: with the position it keys dropout
    length: int  # of a whole sequence; positions are below it
    documents: Tensor | None = None  # [B, S] attention is within equal numbers; None: one document per sequence
    row_documents: NDArray[np.integer] | None = (
        None  # [B, length] of whole sequences, on the host; if tokens are a slice
    )
    real: int | None = None  # so many sequences, the first ones, are real, the rest is padding; None: all are real

    @classmethod
    def of(cls, tokens: Tensor) -> Self:
        """Whole sequences that start at position 0, of no particular sample."""
        batch, seq = tokens.shape
        positions = torch.arange(seq, device=tokens.device).expand(batch, seq)
        return cls(positions, torch.zeros(batch, dtype=torch.int64, device=tokens.device), seq)

    def mask(self, window: int = 0) -> Tensor | None:
        """The attention mask, [B, 1, S, S], limited to a window if there is one; None: plain causal, for which kernels
        need no mask."""
        if self.documents is None and not window:
            return None
        distance = self.position_ids[:, :, None] - self.position_ids[:, None, :]
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        if self.documents is not None:
            seen = seen & (self.documents[:, :, None] == self.documents[:, None, :])
        return seen[:, None]

    def host_documents(self) -> NDArray[np.integer] | None:
        """The documents of whole rows, on the host; without `row_documents` they are copied from the device."""
        if self.row_documents is not None:
            return self.row_documents
        return None if self.documents is None else self.documents.cpu().numpy()


# ---- linear ---------------------------------------------------------------------------------------------------------
# A linear that costs nothing to create on the meta device.


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Skipped on the meta device, where it has no effect, and where torch would import its compiler."""
        if not self.weight.is_meta:
            super().reset_parameters()


# ---- activations ----------------------------------------------------------------------------------------------------
# The activations of dense feed-forward networks and of experts.


SWIGLU_LIMIT = 7.0  # swiglu_limit of gpt-oss


def gated(name: str) -> bool:
    """Whether an activation takes two inputs, of the linears gate and up."""
    return name.startswith("swiglu")


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """arXiv 2002.05202."""
    return F.silu(gate) * up


def _swiglu_clamped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: the gate is bounded above, the input on both sides; 1.702 makes the sigmoid a GELU's."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": _swiglu,
    "swiglu_clamped": _swiglu_clamped,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


# ---- norms ----------------------------------------------------------------------------------------------------------
# Norms whose weights have higher precision than their input: computed in the weights' dtype, and cast at the end.


def apply_norm(norm: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`norm` of x [..., E] with the given parameters, which may be shards of the module's."""
    if x.dtype == weight.dtype:
        return _stock_norm(norm, x, weight, bias)
    if torch.compiler.is_compiling():  # a graph fuses the casts, and saves x in low precision
        return _stock_norm(norm, x.to(weight.dtype), weight, bias).to(x.dtype)
    return UpcastNorm.apply(norm, x, weight, bias)


def _stock_norm(norm: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's kernel of the norm."""
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
    assert isinstance(norm, nn.RMSNorm)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


class UpcastNorm(Function):
    """A norm in the dtype of its weights, of a low-precision x.

    Saves x in low precision for the backward pass, which casts it again: the upcast copy is twice as large."""

    @staticmethod
    def forward(ctx: Any, norm: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(x, weight, bias)
        return _stock_norm(norm, x.to(weight.dtype), weight, bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        with torch.enable_grad():
            params = [None if param is None else param.detach().requires_grad_() for param in (weight, bias)]
            x_upcast = x.detach().to(weight.dtype).requires_grad_()
            y = _stock_norm(ctx.norm, x_upcast, *params)  # type: ignore[arg-type]
        inputs = [x_upcast, *(param for param in params if param is not None)]
        dx, *rest = torch.autograd.grad(y, inputs, gradient.to(weight.dtype))
        return None, dx.to(x.dtype), *rest, *[None] * (2 - len(rest))
