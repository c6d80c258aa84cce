"""The figures of a trace: the time of each rank's step, divided into parts that add up.

    compute     the rank is in F, B, I or W and does not wait for a collective
    exposed     the rank waits for a collective, by axis
    bubble      the pipeline runs and the rank has nothing to compute: the schedule's own bubble, messages and jitter
    optimizer   the norm, the update and the all-gather of the weights
    other       the rest: the batch and the loop itself

`hidden` communication overlaps with compute or with the bubble, so it takes no time of its own. `wait` is the part of
the bubble in which the rank waits to receive or to send a message. The predicted bubble is that of the same schedule on
the simulator, with the measured durations.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, median
from typing import Any

import numpy as np

from fivefold.layout.axes import shown_order
from fivefold.schedules.actions import Action, Kind
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.costs import Costs
from fivefold.schedules.simulate import simulate
from fivefold.tracing.records import (
    Flight,
    NamedSpan,
    RankTrace,
    StepWindow,
    Trace,
    Wait,
    end_sends_at_consumers,
    joined_pairs,
)

Span = StepWindow | BusySpan | NamedSpan | Wait | Flight
Mask = np.ndarray[Any, np.dtype[np.bool_]]  # for each interval of a step, whether something goes on: see `_divide`


@dataclass(frozen=True)
class TracedTime:
    """Seconds of one rank in one step, or the mean over steps or ranks."""

    step: float
    compute: float
    bubble: float
    optimizer: float
    other: float
    wait: float
    exposed: dict[str, float]
    hidden: dict[str, float]

    @classmethod
    def mean(cls, times: list["TracedTime"]) -> "TracedTime":
        def by_axis(name: str) -> dict[str, float]:
            axes = {axis for time in times for axis in getattr(time, name)}
            return {axis: mean(getattr(time, name).get(axis, 0.0) for time in times) for axis in axes}

        numbers = ("step", "compute", "bubble", "optimizer", "other", "wait")
        means = {name: mean(getattr(time, name) for time in times) for name in numbers}
        return cls(**means, exposed=by_axis("exposed"), hidden=by_axis("hidden"))


@dataclass(frozen=True)
class Bubble:
    """The share of a pipeline's run in which a rank did not compute, or the mean over ranks."""

    measured: float
    predicted: float


class TraceSummary:
    def __init__(self, trace: Trace):
        self.trace = end_sends_at_consumers(trace)
        pipelines = self.trace.pipelines
        self.simulations = [simulate(trace.schedule, _measured_costs(self.trace, pipeline)) for pipeline in pipelines]
        self.pipeline_of = {rank.rank: number for number, pipeline in enumerate(pipelines) for rank in pipeline}

    @cached_property
    def by_rank(self) -> list[TracedTime]:
        """The times of each rank, the mean over the traced steps."""
        means = []
        for rank in self.trace.ranks:
            pipeline = self.trace.pipelines[self.pipeline_of[rank.rank]]
            runs = [self.trace.schedule_run(pipeline, index) for index in range(len(rank.steps))]
            times = [_divide(rank, window, run) for window, run in zip(rank.steps, runs, strict=True)]
            means.append(TracedTime.mean(times))
        return means

    @cached_property
    def total(self) -> TracedTime:
        """The mean over ranks."""
        return TracedTime.mean(self.by_rank)

    @property
    def axes(self) -> list[str]:
        axes = {axis for time in self.by_rank for axis in (*time.exposed, *time.hidden)}
        return sorted(axes, key=lambda axis: (shown_order(axis), axis))

    @property
    def action_parts(self) -> dict[str, float]:
        """Seconds of a step in dispatch and combine, waits included: the mean over ranks."""
        rank_steps = self.trace.step_count * len(self.trace.ranks)
        spans = [part for rank in self.trace.ranks for part in rank.action_parts]
        names = dict.fromkeys(part.name for part in spans)
        return {name: sum(part.end - part.start for part in spans if part.name == name) / rank_steps for name in names}

    # ---- bubbles -------------------------------------------------------------------------------------------------

    def makespan(self, pipeline: int, index: int) -> float:
        """Seconds that a pipeline's run of the schedule took, in the traced step of this index."""
        run = self.trace.schedule_run(self.trace.pipelines[pipeline], index)
        return run.end - run.start

    def bubble_of(self, rank: RankTrace) -> Bubble:
        pipeline = self.pipeline_of[rank.rank]
        seconds = sum(self.makespan(pipeline, index) for index in range(self.trace.step_count))
        busy = sum(span.end - span.start for window in rank.steps for span in rank.actions_in(window))
        simulation = self.simulations[pipeline]
        predicted = simulation.ranks[rank.pp_rank].busy / simulation.makespan if simulation.makespan else 1.0
        return Bubble(1 - busy / seconds if seconds else 0.0, 1 - predicted)

    @property
    def bubble(self) -> Bubble:
        ranks = [self.bubble_of(rank) for rank in self.trace.ranks]
        return Bubble(mean(b.measured for b in ranks), mean(b.predicted for b in ranks))

    @property
    def untraced(self) -> float | None:
        """The seconds of a step that was not traced, which show what tracing itself costs."""
        seconds = [rank.untraced for rank in self.trace.ranks if rank.untraced is not None]
        return median(seconds) if seconds else None


def _measured_costs(trace: Trace, pipeline: list[RankTrace]) -> Costs:
    """The durations of a pipeline's actions, of all microbatches and steps, for the simulator; messages take no time.

    The duration of a joined pair is the sum of all spans of its two actions.
    """
    alone, paired = defaultdict[tuple[Kind, int], list[float]](list), defaultdict[tuple[Kind, int], list[float]](list)
    pairs, partner_of = defaultdict[int, list[float]](list), joined_pairs(trace.schedule)
    in_pairs = {*partner_of, *partner_of.values()}
    for rank in pipeline:
        for window in rank.steps:
            durations: dict[Action, float] = defaultdict(float)
            for span in rank.actions_in(window):
                durations[span.action] += span.end - span.start
            for action, seconds in durations.items():
                (paired if action in in_pairs else alone)[action.kind, action.stage].append(seconds)
                if (partner := partner_of.get(action)) in durations:
                    pairs[action.stage].append(seconds + durations[partner])
    # Actions of pairs overlap with communication, so their durations are used only where there is no action alone.
    costs = Costs.measured(paired | alone, trace.schedule.placement.stages)
    if not pairs:
        return costs
    pair_costs = (
        median(pairs[stage]) if stage in pairs else f + b
        for stage, (f, b) in enumerate(zip(costs.f, costs.b, strict=True))
    )
    return replace(costs, pair=tuple(pair_costs))


def _divide(rank: RankTrace, window: StepWindow, schedule_run: StepWindow) -> TracedTime:
    """Divides a rank's step into its parts. `schedule_run` is that of the rank's pipeline.

    The step is divided into intervals wherever any span starts or ends, so that a set of times is a mask of intervals.
    """
    spans: list[Span] = [window, schedule_run, *rank.actions, *rank.updates, *rank.waits, *rank.flights]
    edges = [edge for span in spans for edge in (span.start, span.end)]
    cuts = np.unique(np.clip(edges, window.start, window.end))
    lengths = np.diff(cuts)

    def during(spans: Iterable[Span]) -> Mask:
        mask = np.zeros(len(lengths), bool)
        for span in spans:
            first, last = np.searchsorted(cuts, (span.start, span.end))
            mask[first:last] = True
        return mask

    def seconds(mask: Mask) -> float:
        return float(lengths[mask].sum())

    in_action, waiting = during(rank.actions), during(())
    bubble = during([schedule_run]) & ~in_action
    exposed: dict[str, Mask] = {}
    for axis in {wait.axis for wait in rank.waits}:
        waits = during(wait for wait in rank.waits if wait.axis == axis and not wait.is_message)
        exposed[axis] = waits & ~bubble & ~waiting
        waiting = waiting | waits & ~bubble
    updating = during(rank.updates) & ~(waiting | in_action | bubble)
    messages = bubble & during(wait for wait in rank.waits if wait.is_message)
    hidden = {}
    for axis in {flight.axis for flight in rank.flights}:
        in_flight = during(flight for flight in rank.flights if flight.axis == axis)
        hidden[axis] = seconds(in_flight & ~exposed.get(axis, during(())))
    compute, idle, optimizer = map(seconds, (in_action & ~waiting, bubble, updating))
    exposed_seconds = {axis: seconds(mask) for axis, mask in exposed.items()}
    total = window.end - window.start
    other = total - (compute + idle + optimizer + sum(exposed_seconds.values()))
    return TracedTime(total, compute, idle, optimizer, other, seconds(messages), exposed=exposed_seconds, hidden=hidden)
