"""Which dtype sums are kept in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F


def wide(dtype: torch.dtype) -> torch.dtype:
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
