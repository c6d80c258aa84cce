"""A trace in numbers: every rank's step, cut into parts that add up.

    compute     in F, B, I or W, and not standing still for a collective
    exposed     standing still for a collective, by axis
    bubble      nothing to compute, while the pipeline runs: the schedule's own, and what messages and jitter add to it
    optimizer   norm, update, handing the weights over
    other       the rest: the batch, and the loop itself

Beside them, `hidden` communication was under way and cost no time of its own: the rank computed, or had nothing to
compute anyway; and `wait` is the part of the bubble in which the rank stood still for a message, or to get rid of one.
"""

from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, median

from fivefold.layout.axes import shown_order
from fivefold.trace.intervals import Intervals, common, length, minus, union
from fivefold.trace.predict import predict
from fivefold.trace.records import RankTrace, Trace, Window, land


@dataclass
class RankTime:
    """Seconds of one rank in one step, or the mean over steps or ranks."""

    step: float = 0.0
    compute: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    wait: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)

    @classmethod
    def mean(cls, times: list["RankTime"]) -> "RankTime":
        numbers = ("step", "compute", "bubble", "optimizer", "other", "wait")
        found = cls(*(mean(getattr(time, name) for time in times) for name in numbers))
        for name in ("exposed", "hidden"):
            axes = {axis for time in times for axis in getattr(time, name)}
            setattr(found, name, {axis: mean(getattr(time, name).get(axis, 0.0) for time in times) for axis in axes})
        return found


@dataclass(frozen=True)
class Bubble:
    """Shares of the time of a pipeline's run in which a rank, or all of them, did not compute."""

    measured: float
    predicted: float


class Summary:
    def __init__(self, trace: Trace):
        self.trace = land(trace)
        lines = self.trace.lines
        self.simulations = [predict(self.trace, line) for line in lines]
        self.line_of = {rank.rank: number for number, line in enumerate(lines) for rank in line}

    @cached_property
    def by_rank(self) -> list[RankTime]:
        """By rank, the mean over the traced steps."""
        return [RankTime.mean(self.steps_of(rank)) for rank in self.trace.ranks]

    @cached_property
    def total(self) -> RankTime:
        """The mean over ranks."""
        return RankTime.mean(self.by_rank)

    @property
    def axes(self) -> list[str]:
        seen = {axis for time in self.by_rank for axis in (*time.exposed, *time.hidden)}
        return sorted(seen, key=lambda axis: (shown_order(axis), axis))

    def steps_of(self, rank: RankTrace) -> list[RankTime]:
        line = self.trace.lines[self.line_of[rank.rank]]
        return [parts(rank, window, [self.trace.run(line, step)]) for step, window in enumerate(rank.steps)]

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
        steps = range(self.trace.steps)
        spans = sum(self.makespan(line, step) for step in steps)
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
        """Seconds of a step before tracing: what tracing itself costs shows beside it."""
        known = [rank.untraced for rank in self.trace.ranks if rank.untraced is not None]
        return median(known) if known else None


def parts(rank: RankTrace, window: Window, pipeline: Intervals) -> RankTime:
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
    found = RankTime(
        step=length(step),
        compute=length(minus(acting, stood)),
        bubble=length(bubble),
        optimizer=length(updating),
        wait=length(messages),
        exposed={axis: length(times) for axis, times in exposed.items()},
        hidden=hidden,
    )
    known = found.compute + found.bubble + found.optimizer + sum(found.exposed.values())
    found.other = found.step - known
    return found
