"""The activations of feed-forward networks, dense ones and experts'. A gated one takes gate and input."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

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
