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
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median

from fivefold.layout.axes import shown_order
from fivefold.schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Kind
from fivefold.schedule.costs import Costs
from fivefold.schedule.simulate import simulate
from fivefold.trace.records import RankTrace, Trace, Window, land

Interval = tuple[float, float]
Intervals = list[Interval]  # a set of moments: sorted (start, end) that do not touch


@dataclass(frozen=True)
class RankTime:
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
    def mean(cls, times: list["RankTime"]) -> "RankTime":
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


class Summary:
    def __init__(self, trace: Trace):
        self.trace = land(trace)
        lines = self.trace.lines
        self.simulations = [simulate(trace.schedule, _measured_costs(self.trace, line)) for line in lines]
        self.line_of = {rank.rank: number for number, line in enumerate(lines) for rank in line}

    @cached_property
    def by_rank(self) -> list[RankTime]:
        """By rank, the mean over the traced steps."""
        found = []
        for rank in self.trace.ranks:
            line = self.trace.lines[self.line_of[rank.rank]]
            runs = [[self.trace.run(line, step)] for step in range(len(rank.steps))]
            found.append(RankTime.mean([_parts(rank, *step) for step in zip(rank.steps, runs, strict=True)]))
        return found

    @cached_property
    def total(self) -> RankTime:
        """The mean over ranks."""
        return RankTime.mean(self.by_rank)

    @property
    def axes(self) -> list[str]:
        seen = {axis for time in self.by_rank for axis in (*time.exposed, *time.hidden)}
        return sorted(seen, key=lambda axis: (shown_order(axis), axis))

    # ---- bubbles -------------------------------------------------------------------------------------------------

    def makespan(self, line: int, step: int) -> float:
        start, end = self.trace.run(self.trace.lines[line], step)
        return end - start

    def measured_bubble(self, line: int, step: int) -> float:
        """Of one run of the schedule; `Simulation.bubble_makespan` is the same of a simulated one."""
        ranks = self.trace.spans(self.trace.lines[line], step)
        busy = sum(span.end - span.start for spans in ranks for span in spans)
        makespan = self.makespan(line, step)
        return 1 - busy / (len(ranks) * makespan) if makespan else 0.0

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
    """Medians by stage and kind over all microbatches and traced steps; messages take no time."""
    seen: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank in line:
        for span in rank.actions:
            seen[span.action.kind, span.action.stage].append(span.end - span.start)
    stages = range(trace.schedule.placement.stages)

    def of(kind: Kind) -> tuple[float, ...]:
        return tuple(median(seen.get((kind, stage), [0.0])) for stage in stages)

    ones = (1.0,) * len(stages)
    return Costs(f=of(FORWARD), i=of(INPUT_GRAD), w=of(WEIGHT_GRAD), b=of(BACKWARD), activation=ones)


def _parts(rank: RankTrace, window: Window, pipeline: Intervals) -> RankTime:
    """One step of a rank. `pipeline`: when its line ran the schedule."""
    step: Intervals = [(window.start, window.end)]
    acting = common(step, union((span.start, span.end) for span in rank.actions))
    bubble = minus(common(step, pipeline), acting)
    stood: Intervals = []
    exposed: dict[str, Intervals] = {}
    for axis in {wait.axis for wait in rank.waits}:
        waits = union((wait.start, wait.end) for wait in rank.waits if wait.axis == axis and not wait.message)
        exposed[axis] = minus(minus(common(step, waits), bubble), stood)
        stood = union((*stood, *exposed[axis]))
    updating = minus(common(step, union((u.start, u.end) for u in rank.updates)), union((*stood, *acting, *bubble)))
    messages = common(bubble, union((wait.start, wait.end) for wait in rank.waits if wait.message))
    hidden = {}
    for axis in {flight.axis for flight in rank.flights}:
        flying = union((flight.start, flight.end) for flight in rank.flights if flight.axis == axis)
        hidden[axis] = length(minus(common(step, flying), exposed.get(axis, [])))
    total, compute, idle, optimizer = map(length, (step, minus(acting, stood), bubble, updating))
    waited = {axis: length(times) for axis, times in exposed.items()}
    other = total - (compute + idle + optimizer + sum(waited.values()))
    return RankTime(total, compute, idle, optimizer, other, length(messages), exposed=waited, hidden=hidden)


# ---- sets of moments -------------------------------------------------------------------------------------------------


def union(parts: Iterable[Interval]) -> Intervals:
    """All moments of any parts, which may overlap and be in any order."""
    found: Intervals = []
    for start, end in sorted(part for part in parts if part[0] < part[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def minus(whole: Intervals, taken: Intervals) -> Intervals:
    """The moments of `whole` that are not in `taken`."""
    found: Intervals = []
    next_ = 0
    for start, end in whole:
        while next_ < len(taken) and taken[next_][1] <= start:
            next_ += 1
        place = next_  # what is taken here may reach into the next of the whole
        while place < len(taken) and taken[place][0] < end:
            if taken[place][0] > start:
                found.append((start, taken[place][0]))
            start = max(start, taken[place][1])
            place += 1
        if start < end:
            found.append((start, end))
    return found


def common(a: Intervals, b: Intervals) -> Intervals:
    return minus(a, minus(a, b))


def length(parts: Intervals) -> float:
    return sum(end - start for start, end in parts)
