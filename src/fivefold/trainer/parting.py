"""Where two runs part: the first step in which a figure of theirs differs, and the first in which it differs by more
than rounding does.

Runs that add the same numbers in another order (another layout, another torch) drift apart from their first step on,
and training lets the drift grow. So a size alone does not tell a real difference from rounding; a jump does. A figure
parts where its relative difference is above what rounding makes of it at once (`FLOORS`), and above `JUMP` times the
largest that it had in any step before. Where nothing that the runs' files say would round otherwise, bits are expected
to be the same, and any difference is real; so it is of weights that were the same to the bit for `PROVEN` updates.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from fivefold.trainer.records import Digest, Digests, Step

Kind = Literal["samples", "rate", "loss", "norm", "parameter", "copies"]
ORDER: tuple[Kind, ...] = ("samples", "rate", "loss", "norm", "copies", "parameter")  # within a step

# Relative differences that may be rounding in any step: at least 30 times those of the first steps of small models in
# several layouts. Later ones above them were at most 11 times the largest before (docs/jobs.md, "A run against a run").
FLOORS: dict[str, dict[str, float]] = {
    "float64": {"loss": 1e-14, "norm": 1e-14, "parameter": 5e-14},
    "float32": {"loss": 3e-6, "norm": 3e-6, "parameter": 2e-5},
    "bfloat16": {"loss": 5e-4, "norm": 3e-2, "parameter": 3e-2},
}
JUMP = 30.0
PROVEN = 4  # updates
_SMALLEST = 1e-30  # of two figures that are not the same, though the sketch of their difference is 0
_RATE_ROUNDING = 1e-12  # of the learning rate, which a machine's cosine may round otherwise


@dataclass(frozen=True)
class Difference:
    step: int
    relative: float  # to the larger of the two; infinite where one of them is no number
    distance: float  # of a parameter: the norm of the difference, estimated


@dataclass
class ComparedFigure:
    """One figure of the two runs, over the steps that both have."""

    kind: Kind
    name: str
    floor: float  # a difference up to here may be rounding; 0: none may
    first: Difference | None = None
    parted: Difference | None = None
    largest: Difference | None = None
    relative: dict[int, float] = field(default_factory=dict)  # by step, of the loss alone: it is drawn

    def see(self, step: int, relative: float, distance: float) -> None:
        if relative == 0.0:
            return
        found = Difference(step, relative, distance)
        before = self.largest.relative if self.largest else 0.0
        if self.parted is None and relative > (max(self.floor, JUMP * before) if self.floor else 0.0):
            self.parted = found
        self.first = self.first or found
        if relative > before:
            self.largest = found

    @property
    def order(self) -> tuple[int, int, float]:
        """By which figures that parted are sorted: step, kind, size."""
        assert self.parted is not None
        return self.parted.step, ORDER.index(self.kind), -self.parted.relative


class ComparedFigures:
    """All figures of two runs. Steps are seen in order."""

    def __init__(self, dtype: str, *, bits: bool):
        self.floors = dict.fromkeys(("loss", "norm", "parameter"), 0.0) if bits else {**FLOORS[dtype]}
        self.samples = ComparedFigure("samples", "samples", 0.0)
        self.rate = ComparedFigure("rate", "learning rate", 0.0)
        self.loss = ComparedFigure("loss", "loss", self.floors["loss"])
        self.norm = ComparedFigure("norm", "gradient norm", self.floors["norm"])
        self.parameters: dict[str, ComparedFigure] = {}
        self.copies: dict[str, ComparedFigure] = {}
        self.digested = 0  # steps of which both have digests
        self.equal: int | None = 0  # updates after which all weights were the same to the bit; None: some differed
        self.proven = False  # whether these were enough to say that the two do not round otherwise

    def __iter__(self) -> Iterator[ComparedFigure]:
        yield from (self.samples, self.rate, self.loss, self.norm, *self.copies.values(), *self.parameters.values())

    @property
    def parted(self) -> list[ComparedFigure]:
        """Those that part, the first first."""
        return sorted((figure for figure in self if figure.parted is not None), key=lambda figure: figure.order)

    def see_step(self, first: Step, second: Step) -> None:
        step = first.step
        others = (first.tokens, first.loss_tokens) != (second.tokens, second.loss_tokens)
        if first.samples is not None and second.samples is not None:  # a release before did not write them
            others |= first.samples != second.samples
        self.samples.see(step, float(others), 0.0)
        rate = relative(first.lr, second.lr)
        self.rate.see(step, rate if rate > _RATE_ROUNDING else 0.0, 0.0)
        apart = relative(first.loss, second.loss)
        self.loss.see(step, apart, 0.0)
        self.loss.relative[step] = apart
        self.norm.see(step, relative(first.grad_norm, second.grad_norm), 0.0)

    def see_digests(self, first: Digests, second: Digests) -> None:
        step = first.step
        self.digested += 1
        masters = [name for name in first.parameters if " " not in name and name in second.parameters]
        if self.equal is not None:
            alike = all(first.parameters[name].bits == second.parameters[name].bits for name in masters)
            self.equal = self.equal + (step > 0) if alike else None
            self.proven |= alike and self.equal is not None and self.equal >= PROVEN
        if self.proven:
            self.floors["parameter"] = 0.0
        for name, one in first.parameters.items():
            if (other := second.parameters.get(name)) is None:
                continue
            figure = self.parameters.get(name)
            if figure is None:
                figure = self.parameters[name] = ComparedFigure("parameter", name, self.floors["parameter"])
            if self.proven and figure.first is None:
                figure.floor = 0.0
            if one.bits != other.bits:
                figure.see(step, *_apart(one, other))
        for side, digests in (("A", first), ("B", second)):
            for parameter in digests.unequal:
                name = f"copies of {parameter} in {side}"
                self.copies.setdefault(name, ComparedFigure("copies", name, 0.0)).see(step, 1.0, 0.0)


def relative(first: float | None, second: float | None) -> float:
    """The distance of two numbers relative to the larger; infinite where one of them is none."""
    if first == second:
        return 0.0
    if first is None or second is None or not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))


def _apart(first: Digest, second: Digest) -> tuple[float, float]:
    """(relative distance, distance) of two parameters whose bits differ."""
    pairs = list(zip(first.sketch, second.sketch, strict=False))
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    size = max(first.norm or 0.0, second.norm or 0.0)
    if first.norm is None or second.norm is None or len(known) < len(pairs) or not known:
        return math.inf, math.inf
    distance = math.sqrt(sum((a - b) ** 2 for a, b in known) / len(known))
    return max(distance / size if size else distance, _SMALLEST), distance
