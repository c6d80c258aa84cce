"""The activations of feed-forward networks, dense ones and experts'. A gated one takes gate and input."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F


def gated(name: str) -> bool:
    return name.startswith("swiglu")


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """arXiv 2002.05202."""
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": _swiglu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
