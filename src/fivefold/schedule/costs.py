"""What actions cost: durations per stage and kind, what an activation weighs, and the link between two ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from fivefold.errors import UserError
from fivefold.schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Kind
from fivefold.schedule.schedule import Placement

Times = float | Sequence[float]
"""One number: the time of a whole rank, shared evenly among its chunks. A sequence: one time per stage."""


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

    @property
    def occupancy(self) -> float:
        """How long a message keeps its channel busy."""
        return self.message / self.bandwidth


@dataclass(frozen=True)
class Costs:
    """Durations per stage. `pair` is a joined F&B, by the stage of its forward; `activation` is what one microbatch's
    activations of the stage weigh, in units of a whole rank's (A)."""

    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    b: tuple[float, ...]
    pair: tuple[float, ...] | None = None  # None: F and B one after the other
    activation: tuple[float, ...] = ()
    gather: float = 0.0
    reduce: float = 0.0
    step: float = 0.0
    link: Link = Link()

    @classmethod
    def even(
        cls,
        placement: Placement,
        f: Times = 1.0,
        i: Times = 1.0,
        w: Times = 1.0,
        *,
        b: Times | None = None,
        fb: Times | None = None,
        link: Link | None = None,
    ) -> Self:
        """Costs from times per rank: with v chunks on a rank, each takes 1/v. B takes I + W unless it is given."""
        i_times, w_times = _per_stage("i", i, placement), _per_stage("w", w, placement)
        b_times = tuple(map(sum, zip(i_times, w_times, strict=True)))
        return cls(
            f=_per_stage("f", f, placement),
            i=i_times,
            w=w_times,
            b=b_times if b is None else _per_stage("b", b, placement),
            pair=None if fb is None else _per_stage("fb", fb, placement),
            activation=_per_stage("activation", 1.0, placement),
            link=link or Link(),
        )

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

        def scaled(times: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(time * factor for time, factor in zip(times, scale, strict=True))

        pair = None if self.pair is None else scaled(self.pair)
        return replace(self, f=scaled(self.f), i=scaled(self.i), w=scaled(self.w), b=scaled(self.b), pair=pair)

    def of(self, kind: Kind) -> tuple[float, ...]:
        """The durations per stage of one kind of compute."""
        return {FORWARD: self.f, BACKWARD: self.b, INPUT_GRAD: self.i, WEIGHT_GRAD: self.w}[kind]

    def joined(self, forward_stage: int, backward_stage: int) -> float:
        """How long an overlapped F&B takes."""
        if self.pair is None:
            return self.f[forward_stage] + self.b[backward_stage]
        return self.pair[forward_stage]


def _per_stage(name: str, times: Times, placement: Placement) -> tuple[float, ...]:
    if isinstance(times, int | float):
        values = tuple(times / len(placement.of_rank[rank]) for rank in placement.owner)
    else:
        values = tuple(times)
    if len(values) != placement.stages:
        raise UserError(
            f"{name} has {len(values)} times, and there are {placement.stages} stages; give one time, or one per stage"
        )
    if not all(0 <= value < math.inf for value in values):
        raise UserError(f"{name}={times} is not a duration; give a number that is zero or more")
    return values
