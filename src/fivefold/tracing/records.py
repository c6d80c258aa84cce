"""The records of traced ranks: spans of time, in seconds of one clock. No torch."""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from fivefold.cost.collective_time import Kind as Collective
from fivefold.schedules.actions import SENDS, Action, Kind
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.schedule import Placement, Schedule


class Wait(NamedTuple):
    """The rank waited for others. `during` is the action that it was in, if any."""

    axis: str
    what: str  # all-reduce ... | send | receive | barrier
    start: float
    end: float
    during: Action | None = None

    @property
    def message(self) -> bool:
        """Whether it is for a message between stages; the other waits are for collectives and the ring of cp."""
        return self.axis == "pp" and self.what in ("send", "receive")


class Flight(NamedTuple):
    """A collective or a send, from its start to its end; if the end is unknown, to the end of the wait for it."""

    axis: str
    kind: Collective
    payload: int  # bytes
    start: float
    end: float
    during: Action | None = None


class StepWindow(NamedTuple):
    """A step of the training loop."""

    step: int
    start: float
    end: float


class Update(NamedTuple):
    """Part of the optimizer's work, or of an action's: tokens on their way to experts, and back."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTrace:
    rank: int
    name: str  # where it is: "dp0 pp1"
    line: int  # which pipeline it is in: the ranks of a line hold the stages of one copy of the model
    place: int  # along the line
    steps: tuple[StepWindow, ...]
    actions: tuple[
        BusySpan, ...
    ]  # compute, without the wait for its input; halves of a pair in turns, stretch by stretch
    updates: tuple[Update, ...]
    waits: tuple[Wait, ...]
    flights: tuple[Flight, ...]
    parts: tuple[Update, ...] = ()  # of actions: dispatch and combine
    untraced: float | None = None  # seconds of a step that was not traced, the median
    clock_error: float = 0.0  # seconds by which its clock may be off rank 0's

    def on_clock(self, offset: float) -> Self:
        """With `offset` added to all times."""

        def moved(spans: Any) -> Any:
            return tuple(span._replace(start=span.start + offset, end=span.end + offset) for span in spans)

        names = ("steps", "actions", "updates", "waits", "flights", "parts")
        return replace(self, **{name: moved(getattr(self, name)) for name in names})

    def within(self, window: StepWindow) -> list[BusySpan]:
        """The actions of a step."""
        return [span for span in self.actions if window.start <= span.start < window.end]


@dataclass(frozen=True)
class Trace:
    """All ranks' records, by rank, and the schedule that they ran."""

    schedule: Schedule
    ranks: tuple[RankTrace, ...]
    layout: str = ""

    @cached_property
    def lines(self) -> list[list[RankTrace]]:
        """The ranks of each pipeline, in its order."""
        lines: dict[int, list[RankTrace]] = defaultdict(list)
        for rank in sorted(self.ranks, key=lambda rank: rank.place):
            lines[rank.line].append(rank)
        return [lines[line] for line in sorted(lines)]

    @property
    def steps(self) -> int:
        return len(self.ranks[0].steps)

    def spans(self, line: list[RankTrace], step: int) -> list[list[BusySpan]]:
        """What each rank of a line computed in its `step`-th traced step."""
        return [rank.within(rank.steps[step]) for rank in line]

    def run(self, line: list[RankTrace], step: int) -> StepWindow:
        """From the first start to the last end of a line's actions: one run of the schedule."""
        spans = [span for rank in self.spans(line, step) for span in rank]
        return StepWindow(step, min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=0.0))


def partners(schedule: Schedule) -> dict[Action, Action]:
    """The B of each joined F."""
    return {
        action: order[at + 1] for order in schedule.ranks for at, action in enumerate(order) if action.joined
    }  # fmt: skip


Started = tuple[Kind, int, int]  # kind, stage and microbatch of an action


def land(trace: Trace) -> Trace:
    """A send ends when its consumer starts, or earlier. The sender learns of it only when it next waits."""
    landed: dict[int, RankTrace] = {}
    placement = trace.schedule.placement
    for line in trace.lines:
        starts = [
            {span.action[:3]: span.start for rank in trace.spans(line, step) for span in reversed(rank)}  # the first
            for step in range(trace.steps)
        ]
        for rank in line:
            flights = (
                flight._replace(end=min(flight.end, _used(flight, rank, placement, starts))) for flight in rank.flights
            )
            landed[rank.rank] = replace(rank, flights=tuple(flights))
    return replace(trace, ranks=tuple(landed[rank.rank] for rank in trace.ranks))


def _used(flight: Flight, rank: RankTrace, placement: Placement, starts: list[dict[Started, float]]) -> float:
    """When the consumer of a message started; infinity where the flight is no message."""
    if flight.during is None or flight.during.kind not in SENDS or flight.kind != "send":
        return float("inf")
    number = next((n for n, window in enumerate(rank.steps) if window.start <= flight.start < window.end), None)
    if number is None:
        return float("inf")
    channel = placement.channel_of[flight.during[:2]]
    place = channel.target, flight.during.microbatch
    times = [starts[number][kind, *place] for kind in channel.compute if (kind, *place) in starts[number]]
    return max(flight.start, min(times, default=float("inf")))
