"""A trace in numbers: the step of each rank, divided into parts that add up.

    compute     the rank is in F, B, I or W and does not wait for a collective
    exposed     the rank waits for a collective, by axis
    bubble      the pipeline runs and the rank has nothing to compute: the schedule's own bubble, messages and jitter
    optimizer   the norm, the update and the handover of the weights
    other       the rest: the batch and the loop itself

`hidden` communication ran while the rank computed or had nothing to compute, so it cost no time of its own. `wait` is
the part of the bubble in which the rank waited to receive or to send a message. The predicted bubble is that of the
same schedule on the simulator's clock, with the measured durations.
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
from fivefold.tracing.records import Flight, RankTrace, StepWindow, Trace, Update, Wait, land, partners

Timed = StepWindow | BusySpan | Update | Wait | Flight
Moments = np.ndarray[Any, np.dtype[np.bool_]]


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
    """Shares of the time of a pipeline's run in which a rank, or all of them, did not compute."""

    measured: float
    predicted: float


class TraceSummary:
    def __init__(self, trace: Trace):
        self.trace = land(trace)
        lines = self.trace.lines
        self.simulations = [simulate(trace.schedule, _measured_costs(self.trace, line)) for line in lines]
        self.line_of = {rank.rank: number for number, line in enumerate(lines) for rank in line}

    @cached_property
    def by_rank(self) -> list[TracedTime]:
        """By rank, the mean over the traced steps."""
        means = []
        for rank in self.trace.ranks:
            line = self.trace.lines[self.line_of[rank.rank]]
            runs = [self.trace.run(line, step) for step in range(len(rank.steps))]
            means.append(TracedTime.mean([_parts(rank, *step) for step in zip(rank.steps, runs, strict=True)]))
        return means

    @cached_property
    def total(self) -> TracedTime:
        """The mean over ranks."""
        return TracedTime.mean(self.by_rank)

    @property
    def axes(self) -> list[str]:
        seen = {axis for time in self.by_rank for axis in (*time.exposed, *time.hidden)}
        return sorted(seen, key=lambda axis: (shown_order(axis), axis))

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step for parts of actions, the mean over ranks: dispatch and combine, waits included."""
        runs = self.trace.steps * len(self.trace.ranks)
        spans = [part for rank in self.trace.ranks for part in rank.parts]
        names = dict.fromkeys(part.name for part in spans)
        return {name: sum(part.end - part.start for part in spans if part.name == name) / runs for name in names}

    # ---- bubbles -------------------------------------------------------------------------------------------------

    def makespan(self, line: int, step: int) -> float:
        run = self.trace.run(self.trace.lines[line], step)
        return run.end - run.start

    def bubble_of(self, rank: RankTrace) -> Bubble:
        line = self.line_of[rank.rank]
        spans = sum(self.makespan(line, step) for step in range(self.trace.steps))
        busy = sum(span.end - span.start for window in rank.steps for span in rank.within(window))
        simulation = self.simulations[line]
        predicted = simulation.ranks[rank.place].busy / simulation.makespan if simulation.makespan else 1.0
        return Bubble(1 - busy / spans if spans else 0.0, 1 - predicted)

    @property
    def bubble(self) -> Bubble:
        ranks = [self.bubble_of(rank) for rank in self.trace.ranks]
        return Bubble(mean(b.measured for b in ranks), mean(b.predicted for b in ranks))

    @property
    def untraced(self) -> float | None:
        """Seconds of a step before tracing, which show what tracing itself costs."""
        known = [rank.untraced for rank in self.trace.ranks if rank.untraced is not None]
        return median(known) if known else None


def _measured_costs(trace: Trace, line: list[RankTrace]) -> Costs:
    """Of all microbatches and traced steps; messages take no time. A pair takes as long as the stretches of both."""
    alone, paired = defaultdict[tuple[Kind, int], list[float]](list), defaultdict[tuple[Kind, int], list[float]](list)
    pairs, second = defaultdict[int, list[float]](list), partners(trace.schedule)
    in_pairs = {*second, *second.values()}
    for rank in line:
        for window in rank.steps:
            took: dict[Action, float] = defaultdict(float)
            for span in rank.within(window):
                took[span.action] += span.end - span.start
            for action, seconds in took.items():
                (paired if action in in_pairs else alone)[action.kind, action.stage].append(seconds)
                if action in second and second[action] in took:
                    pairs[action.stage].append(seconds + took[second[action]])
    # A pass by itself hides nothing: only where there is none like it, halves of pairs stand for it.
    costs = Costs.measured(paired | alone, trace.schedule.placement.stages)
    if not pairs:
        return costs
    either = (
        median(pairs[stage]) if stage in pairs else f + b
        for stage, (f, b) in enumerate(zip(costs.f, costs.b, strict=True))
    )
    return replace(costs, pair=tuple(either))


def _parts(rank: RankTrace, window: StepWindow, pipeline: StepWindow) -> TracedTime:
    """One step of a rank. `pipeline`: when its line ran the schedule.

    The step is cut wherever anything starts or ends, so that a set of its moments is an array of booleans, a cut each.
    """
    everything: list[Timed] = [window, pipeline, *rank.actions, *rank.updates, *rank.waits, *rank.flights]
    edges = [edge for span in everything for edge in (span.start, span.end)]
    cuts = np.unique(np.clip(edges, window.start, window.end))
    lengths = np.diff(cuts)

    def during(spans: Iterable[Timed]) -> Moments:
        mask = np.zeros(len(lengths), bool)
        for span in spans:
            first, last = np.searchsorted(cuts, (span.start, span.end))
            mask[first:last] = True
        return mask

    def seconds(moments: Moments) -> float:
        return float(lengths[moments].sum())

    acting, waiting = during(rank.actions), during(())
    bubble = during([pipeline]) & ~acting
    exposed: dict[str, Moments] = {}
    for axis in {wait.axis for wait in rank.waits}:
        waits = during(wait for wait in rank.waits if wait.axis == axis and not wait.message)
        exposed[axis] = waits & ~bubble & ~waiting
        waiting = waiting | waits & ~bubble
    updating = during(rank.updates) & ~(waiting | acting | bubble)
    messages = bubble & during(wait for wait in rank.waits if wait.message)
    hidden = {}
    for axis in {flight.axis for flight in rank.flights}:
        flying = during(flight for flight in rank.flights if flight.axis == axis)
        hidden[axis] = seconds(flying & ~exposed.get(axis, during(())))
    compute, idle, optimizer = map(seconds, (acting & ~waiting, bubble, updating))
    waited = {axis: seconds(moments) for axis, moments in exposed.items()}
    total = window.end - window.start
    other = total - (compute + idle + optimizer + sum(waited.values()))
    return TracedTime(total, compute, idle, optimizer, other, seconds(messages), exposed=waited, hidden=hidden)
