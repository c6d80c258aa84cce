"""What ranks report of foreign training code: plain numbers and arrays, which the parent compares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.foreign.adapter import Layout

Values = NDArray[np.float64]
Numbers = NDArray[np.int64]
Device = Literal["cpu", "cuda"]
SEED = 1234
SEEDS = 2**31


@dataclass(frozen=True)
class Settings:
    """How a proof is run."""

    steps: int
    device: Device = "cpu"
    seed: int = SEED
    watch: bool = False  # look into modules, dropout and gradients before they are reduced; first step only
    still: bool = False  # dropout leaves everything as it is


@dataclass(frozen=True)
class AdapterDescription:
    """What an adapter says of itself."""

    layouts: Sequence[Layout]  # those that were asked for, or else its own
    worlds: Sequence[int]  # of each layout, how many ranks it has
    dtype: str
    known: Sequence[Mapping[str, float]]  # by layout
    updates: bool

    @property
    def cases(self) -> list[tuple[Layout, int, Mapping[str, float]]]:
        """Each layout, its ranks, and what its factors may be named after."""
        return list(zip(self.layouts, self.worlds, self.known, strict=True))


@dataclass(frozen=True)
class Call:
    """A call of a module in the forward pass: fingerprints of its tokens, going in and coming out and their gradients.

    A fingerprint is two projections of a token's vector, by which it is found among those of one process."""

    module: str
    inputs: Values  # [tokens, 2]; empty where there is nothing to compare
    outputs: Values
    gradients: Values  # of the outputs
    width: int  # of outputs
    part: int = 0  # how many calls this module had before: its microbatch, where each is a call


@dataclass(frozen=True)
class Drop:
    """A call of dropout: where, and digests of what went in and which elements were left."""

    place: str
    entered: str
    kept: str
    dropped: int = 0  # elements
    again: bool = False  # in a backward pass, which computes something again


@dataclass(frozen=True)
class Buffer:
    """A registered buffer of floating point: how large, and the digest of its values."""

    shape: tuple[int, ...]
    digest: str


@dataclass
class Observation:
    """What a rank saw in one step, where it was asked to look."""

    calls: list[Call] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    unreduced: dict[str, Values] = field(default_factory=dict)  # what the rank itself added to each gradient
    buffers: dict[str, Buffer] = field(default_factory=dict)  # those that the step leaves as they are


@dataclass(frozen=True)
class RankValues:
    """What a rank measured, of all steps or of the next part of one: `joined` puts parts together."""

    rank: int
    numbers: Mapping[str, Numbers]  # of each local parameter's elements in the whole; -1: padding
    losses: Sequence[float | None]
    norms: Sequence[float | None]
    gradients: Sequence[Mapping[str, Values | None]]  # by step; None: it has none
    parameters: Sequence[Mapping[str, Values]]  # after each step
    trace: Observation | None = None
    batches: Sequence[str] = ()  # by step, the digest of the batch


def joined(parts: Sequence[RankValues]) -> RankValues:
    """The parts that a rank gave, one after the other; the first has the numbers of the elements."""
    first = parts[0]
    return RankValues(
        first.rank,
        first.numbers,
        losses=[loss for part in parts for loss in part.losses],
        norms=[norm for part in parts for norm in part.norms],
        gradients=[gradients for part in parts for gradients in part.gradients],
        parameters=[parameters for part in parts for parameters in part.parameters],
        trace=next((part.trace for part in reversed(parts) if part.trace is not None), None),
        batches=[batch for part in parts for batch in part.batches],
    )


@dataclass(frozen=True)
class OneProcess:
    """One process: all values at their numbers."""

    shapes: Mapping[str, tuple[int, ...]]
    losses: Sequence[float]
    norms: Sequence[float | None]
    gradients: Sequence[Values]
    weights: Values  # before the first step
    parameters: Sequence[Values]  # after each
    versions: Mapping[str, str]  # of the packages that were imported
    random: str  # "dropout" or "draws", if another seed gives another loss; values are those without dropout
    noise: Sequence[Values] = ()  # by step, of each parameter's gradient: what a rounding of the weights does to it
    parameter_noise: Sequence[Values] = ()  # the same of the parameters
    loss_noise: float = 0.0
    norm_noise: float = 0.0
    threads: int = 1
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of what the adapter imports from beside itself
    batches: Sequence[str] = ()  # by step, the digest of the batch
    ungraded: Sequence[str] = ()  # parameters that require a gradient and have none in any step

    def until(self, steps: int, updates: int) -> "OneProcess":
        """The same, as far as somebody came who took so many steps, and so many updates."""
        return replace(
            self, losses=self.losses[:steps], gradients=self.gradients[:steps], norms=self.norms[:updates],
            parameters=self.parameters[:updates],
        )  # fmt: skip


@dataclass(frozen=True)
class Insight:
    """What one process knows beyond the values, computed when a layout fails."""

    samples: Mapping[int, Values]  # the gradient of each sample alone, if it has any; none of batches in one piece
    counts: Sequence[int]  # of all samples, how many targets each has; none where that cannot be told
    terms: Mapping[str, Values]  # the gradient without a term of the loss
    trace: Observation
