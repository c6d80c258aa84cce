"""What actions cost: durations per stage and kind, what an activation weighs, and the link between two ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from statistics import median
from typing import Any, Literal, Self

from fivefold.schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Kind
from fivefold.schedule.pairs import Segments, one_block, play, scaled
from fivefold.schedule.schedule import Placement
from fivefold.support.errors import UserError

Duration = float | Sequence[float]
"""One number: the time of a whole rank, shared evenly among its chunks. A sequence: one time per stage."""

LONGEST = 1e30  # of any one duration, in any unit: sums of millions of them are still numbers


def _is_duration(value: float) -> bool:
    return 0 <= value <= LONGEST  # false for nan


@dataclass(frozen=True)
class Link:
    """How a message travels: `latency` after it has left, and leaving takes `message / bandwidth`.

    Messages of one channel leave one after the other; channels do not slow each other. `sends`: "eager" lets the
    sender compute on while the message travels, "blocking" holds it until delivery. `overlap=False` starts a transfer
    only when the consumer's turn has come, so that the receiver stands still meanwhile.
    """

    latency: float = 0.0
    bandwidth: float = math.inf  # bytes per unit of time
    message: float = 0.0  # bytes
    sends: Literal["eager", "blocking"] = "eager"
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.sends not in ("eager", "blocking"):
            raise UserError(f"a link's sends are 'eager' or 'blocking', not {self.sends!r}")
        if not self.bandwidth > 0 or not 0 <= self.message < math.inf:
            raise UserError(
                f"a link with bandwidth={self.bandwidth:g} and messages of {self.message:g} bytes cannot be: the "
                "bandwidth must be above zero (infinite by default), the message zero or more"
            )
        if not (_is_duration(self.latency) and _is_duration(self.occupancy)):
            raise UserError(
                f"a message takes a latency of {self.latency:g} and {self.message:g} bytes / {self.bandwidth:g} = "
                f"{self.occupancy:g} on the link; both must be between 0 and {LONGEST:g}"
            )

    @property
    def occupancy(self) -> float:
        """How long a message keeps its channel busy."""
        return self.message / self.bandwidth


@dataclass(frozen=True)
class Costs:
    """Durations per stage. A joined F&B takes what `pair` says, by the stage of its forward, or else what comes of
    playing the `segments` of its F and its B. `activation` is what one microbatch's activations of the stage weigh, in
    units of a whole rank's (A)."""

    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    b: tuple[float, ...]
    activation: tuple[float, ...]
    pair: tuple[float, ...] | None = None
    segments: tuple[tuple[Segments, Segments], ...] = ()  # of each stage's F and B; none: a pair takes F + B
    gather: float = 0.0
    reduce: float = 0.0
    step: float = 0.0
    link: Link = Link()

    def __post_init__(self) -> None:
        per_stage = {"f": self.f, "i": self.i, "w": self.w, "b": self.b, "activation": self.activation}
        if self.pair is not None:
            per_stage["fb"] = self.pair
        if self.segments and len(self.segments) != len(self.f):
            raise UserError(f"f has times for {len(self.f)} stages, and there are segments of {len(self.segments)}")
        for name, values in per_stage.items():
            if len(values) != len(self.f):
                raise UserError(f"f has times for {len(self.f)} stages, and {name} for {len(values)}; they must agree")
        once = {"gather": (self.gather,), "reduce": (self.reduce,), "step": (self.step,)}
        for name, values in (per_stage | once).items():
            strange = next((value for value in values if not _is_duration(value)), None)
            if strange is not None:
                raise UserError(f"{name}={strange:g} is not a duration; give a number from zero to {LONGEST:g}")

    @classmethod
    def even(
        cls,
        placement: Placement,
        f: Duration = 1.0,
        i: Duration = 1.0,
        w: Duration = 1.0,
        *,
        b: Duration | None = None,
        fb: Duration | None = None,
        ep: Duration | None = None,
        link: Link | None = None,
    ) -> Self:
        """Costs from times per rank: with v chunks on a rank, each takes 1/v. B takes I + W unless it is given. Of F,
        and of B, experts' messages take `ep`, which the other half of a joined pair hides."""
        i_times, w_times = _per_stage("i", i, placement), _per_stage("w", w, placement)
        b_times = tuple(map(sum, zip(i_times, w_times, strict=True)))
        f_times = _per_stage("f", f, placement)
        b_times = b_times if b is None else _per_stage("b", b, placement)
        return cls(
            f=f_times,
            i=i_times,
            w=w_times,
            b=b_times,
            segments=() if ep is None else _halves(f_times, i_times, b_times, _per_stage("ep", ep, placement)),
            pair=None if fb is None else _per_stage("fb", fb, placement),
            activation=_per_stage("activation", 1.0, placement),
            link=link or Link(),
        )

    @classmethod
    def measured(cls, seconds: Mapping[tuple[Kind, int], Sequence[float]], stages: int) -> Self:
        """Medians of what each kind and stage took; messages take no time, and stages weigh the same."""
        f, i, w, b = (
            tuple(median(seconds.get((kind, stage), [0.0])) for stage in range(stages))
            for kind in (FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD)
        )
        return cls(f, i, w, b, activation=(1.0,) * stages)

    @classmethod
    def slots(cls, placement: Placement) -> Self:
        """One slot for every F, I and W of a stage, two for a B, none for a message: the clock of `Promise.slots`."""
        ones = (1.0,) * placement.stages
        return cls(f=ones, i=ones, w=ones, b=(2.0,) * placement.stages, activation=ones)

    def slowed(self, placement: Placement, factors: Mapping[int, float]) -> Self:
        """The same work on mixed machines: `factors[rank]` times as long on that rank."""
        strange = [rank for rank in factors if not 0 <= rank < placement.ranks]
        if strange:
            raise UserError(f"rank {strange[0]} cannot be slowed: ranks are 0 to {placement.ranks - 1}")
        scale = [factors.get(rank, 1.0) for rank in placement.owner]
        times = {"f": self.f, "i": self.i, "w": self.w, "b": self.b} | ({"pair": self.pair} if self.pair else {})
        slower: dict[str, Any] = {name: tuple(map(mul, stages, scale)) for name, stages in times.items()}
        halves = zip(self.segments, scale[: len(self.segments)], strict=True)
        segments = tuple((scaled(f, factor), scaled(b, factor)) for (f, b), factor in halves)
        return replace(self, **slower, segments=segments)

    def of(self, kind: Kind) -> tuple[float, ...]:
        """The durations per stage of one kind of compute."""
        return {FORWARD: self.f, BACKWARD: self.b, INPUT_GRAD: self.i, WEIGHT_GRAD: self.w}[kind]

    def joined(self, forward_stage: int, backward_stage: int) -> float:
        """How long an F&B takes."""
        if self.pair is not None:
            return self.pair[forward_stage]
        if self.segments:
            return play(self.segments[forward_stage][0], self.segments[backward_stage][1]).together
        return self.f[forward_stage] + self.b[backward_stage]


def _halves(
    f: tuple[float, ...], i: tuple[float, ...], b: tuple[float, ...], ep: tuple[float, ...]
) -> tuple[tuple[Segments, Segments], ...]:
    for stage, (messages, *passes) in enumerate(zip(ep, f, i, b, strict=True)):
        if messages > min(passes):
            raise UserError(
                f"ep={messages:g} of stage {stage} is a part of its passes, the shortest of which takes "
                f"{min(passes):g}; give at most that"
            )
    return tuple(map(one_block, f, b, ep))


def _per_stage(name: str, times: Duration, placement: Placement) -> tuple[float, ...]:
    if isinstance(times, int | float):
        return tuple(times / len(placement.of_rank[rank]) for rank in placement.owner)
    values = tuple(times)
    if len(values) != placement.stages:
        raise UserError(
            f"{name} has {len(values)} times, and there are {placement.stages} stages; give one time, or one per stage"
        )
    return values
