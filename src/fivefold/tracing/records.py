"""The records of traced ranks: spans of time, in seconds of one clock. No torch."""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from fivefold.cost.collective_time import Kind as Collective
from fivefold.schedules.actions import SEND_KINDS, Action, Kind
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.schedule import Placement, Schedule


class Wait(NamedTuple):
    """A wait of the rank for others. `during` is the action that it was in, if any."""

    axis: str
    what: str  # the operation: all-reduce ... | send | receive | barrier
    start: float
    end: float
    during: Action | None = None

    @property
    def is_message(self) -> bool:
        """Whether it waits for a message between stages; other waits are for collectives and the ring of cp."""
        return self.axis == "pp" and self.what in ("send", "receive")


class Flight(NamedTuple):
    """A collective or a send; if its end is unknown, it ends with the wait for it."""

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


class NamedSpan(NamedTuple):
    """A part of the optimizer's work, or of an action (the dispatch of tokens to experts, or the combine)."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTrace:
    rank: int
    name: str  # its coordinates: "dp0 pp1"
    pipeline: int  # the number of its pipeline: its ranks have the stages of one replica of the model
    pp_rank: int  # its rank in the pipeline
    steps: tuple[StepWindow, ...]
    # Compute, without the wait for its input. An action has several spans, where the halves of a pair run alternately.
    actions: tuple[BusySpan, ...]
    updates: tuple[NamedSpan, ...]  # parts of the optimizer's work
    waits: tuple[Wait, ...]
    flights: tuple[Flight, ...]
    action_parts: tuple[NamedSpan, ...] = ()  # dispatch and combine
    untraced: float | None = None  # the median seconds of steps that were not traced
    clock_error: float = 0.0  # seconds by which its times may be off from rank 0's clock, at most

    def on_clock(self, offset: float) -> Self:
        """The records with `offset` added to all times."""

        def moved(spans: Any) -> Any:
            return tuple(span._replace(start=span.start + offset, end=span.end + offset) for span in spans)

        names = ("steps", "actions", "updates", "waits", "flights", "action_parts")
        return replace(self, **{name: moved(getattr(self, name)) for name in names})

    def actions_in(self, window: StepWindow) -> list[BusySpan]:
        return [span for span in self.actions if window.start <= span.start < window.end]


@dataclass(frozen=True)
class Trace:
    """All ranks' records, by rank, and the schedule that they ran."""

    schedule: Schedule
    ranks: tuple[RankTrace, ...]
    layout: str = ""

    @cached_property
    def pipelines(self) -> list[list[RankTrace]]:
        """The ranks of each pipeline, in its order."""
        pipelines: dict[int, list[RankTrace]] = defaultdict(list)
        for rank in sorted(self.ranks, key=lambda rank: rank.pp_rank):
            pipelines[rank.pipeline].append(rank)
        return [pipelines[pipeline] for pipeline in sorted(pipelines)]

    @property
    def step_count(self) -> int:
        """How many steps were traced."""
        return len(self.ranks[0].steps)

    def actions_by_rank(self, pipeline: list[RankTrace], index: int) -> list[list[BusySpan]]:
        """The actions of each rank of a pipeline in the traced step of this index."""
        return [rank.actions_in(rank.steps[index]) for rank in pipeline]

    def schedule_run(self, pipeline: list[RankTrace], index: int) -> StepWindow:
        """From the first start to the last end of a pipeline's actions, in the traced step of this index."""
        spans = [span for actions in self.actions_by_rank(pipeline, index) for span in actions]
        return StepWindow(index, min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=0.0))


def joined_pairs(schedule: Schedule) -> dict[Action, Action]:
    """{F: the B that it is joined with}."""
    return {
        action: order[index + 1] for order in schedule.ranks for index, action in enumerate(order) if action.joined
    }  # fmt: skip


ActionKey = tuple[Kind, int, int]  # kind, stage and microbatch of an action


def end_sends_at_consumers(trace: Trace) -> Trace:
    """The trace with each send ended no later than its consumer starts.

    The sender records the end of its own wait, which may come long after the message has arrived.
    """
    ranks: dict[int, RankTrace] = {}
    placement = trace.schedule.placement
    for pipeline in trace.pipelines:
        starts = [
            # In reverse order, so that an action's first span replaces its later ones.
            {
                span.action[:3]: span.start
                for actions in trace.actions_by_rank(pipeline, index)
                for span in actions[::-1]
            }
            for index in range(trace.step_count)
        ]
        for rank in pipeline:
            flights = (
                flight._replace(end=min(flight.end, _consumer_start(flight, rank, placement, starts)))
                for flight in rank.flights
            )
            ranks[rank.rank] = replace(rank, flights=tuple(flights))
    return replace(trace, ranks=tuple(ranks[rank.rank] for rank in trace.ranks))


def _consumer_start(
    flight: Flight, rank: RankTrace, placement: Placement, starts: list[dict[ActionKey, float]]
) -> float:
    """When the action that consumes a message starts; infinity if the flight is not a message.

    `starts` are those of the pipeline's actions, for each traced step.
    """
    if flight.during is None or flight.during.kind not in SEND_KINDS or flight.kind != "send":
        return float("inf")
    index = next((n for n, window in enumerate(rank.steps) if window.start <= flight.start < window.end), None)
    if index is None:
        return float("inf")
    channel = placement.channel_of[flight.during[:2]]
    keys = [(kind, channel.target, flight.during.microbatch) for kind in channel.compute]
    times = [starts[index][key] for key in keys if key in starts[index]]
    return max(flight.start, min(times, default=float("inf")))
