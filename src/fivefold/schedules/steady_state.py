"""How long a schedule of many microbatches takes, without walking through all of them.

    timed = time_steps(build, costs, m=2048, first=48, period=16)
    [seconds] = timed.total(lambda simulation: [simulation.makespan])

Between its warm-up and its cool-down a schedule repeats itself, every `period` microbatches. Two schedules are built
and walked, one a period longer than the other. If the longer one ends as the shorter one does, only later, every period
beyond it takes as long as this one, and the rest is arithmetic.

Why that holds. When an action ends depends on when the action before it on its rank ended, and on when its message was
sent: on ends of actions, to which times are added and of which the latest counts. So if all ends before a point of the
lists are late by times between two bounds, so are all ends behind it. `lateness` looks at the last two periods of every
rank's list: the cool-down and a period before it, with every message under way. By as much
as they are late at least and at most, each further period takes longer at least and at most. As a rule the two are
equal, to a rounding error. Where they are not, because a rank is nearly as slow as the slowest, the pace may change
after many microbatches. If that could matter, longer schedules are compared, and at last the whole one is walked.
"""

import math
from collections.abc import Callable, Sequence
from operator import sub
from typing import NamedTuple

from fivefold.schedules.actions import Action
from fivefold.schedules.costs import Costs
from fivefold.schedules.schedule import Schedule
from fivefold.schedules.simulate import Simulation, simulate

GROWTH = 4  # how many times as long schedules are compared next, where those a period longer do not repeat either
MATTERS = 5e-4  # of the whole: by no more may the bounds of all periods differ


class TimedStep(NamedTuple):
    """A schedule of m microbatches: one that was walked, and how many more periods it has than that."""

    simulation: Simulation
    longer: Simulation | None = None  # by one period
    periods: int = 0

    def total(self, figures: Callable[[Simulation], Sequence[float]]) -> list[float]:
        """Figures of the whole, which grow as much with each period."""
        once = list(figures(self.simulation))
        if self.longer is None:
            return once
        return [one + self.periods * (two - one) for one, two in zip(once, figures(self.longer), strict=True)]


def time_steps(build: Callable[[int], Schedule], costs: Costs, m: int, first: int, period: int) -> TimedStep:
    """Time a schedule of m microbatches by shorter ones, of `first` at least, to which periods are missing."""
    few, walked = first, dict[int, Simulation]()
    while few + period < m:
        for count in (few, few + period):
            if count not in walked:
                walked[count] = simulate(build(count), costs)
        timed = TimedStep(walked[few], walked[few + period], (m - few) // period)
        least, most = lateness(walked[few], walked[few + period], period)
        [whole] = timed.total(lambda run: [run.makespan])
        if timed.periods * (most - least) <= MATTERS * whole:
            return timed
        few += period if few == first else (GROWTH - 1) * (few // period) * period
    return TimedStep(simulate(build(m), costs))


def lateness(simulation: Simulation, longer: Simulation, period: int) -> tuple[float, float]:
    """By how much the actions of the last two periods end later in a schedule that is a period longer, at least and at
    most. Unbounded if the two do not begin and end with the same actions, or if the longer one holds more activations,
    as GPipe does: then it has no steady state."""
    if simulation.schedule.in_flight != longer.schedule.in_flight:
        return -math.inf, math.inf
    late: list[float] = []
    for short, long in zip(simulation.run.lanes, longer.run.lanes, strict=True):
        count = min(len(short.ends), 2 * len(short.ends) * period // simulation.schedule.m)
        begin = len(short.ends) - count
        if short.actions[:begin] != long.actions[:begin] or not _same(
            short.actions[begin:], long.actions[-count:], period
        ):
            return -math.inf, math.inf
        late += map(sub, long.ends[-count:], short.ends[begin:])
    return min(late), max(late)


def _same(actions: list[Action], later: list[Action], period: int) -> bool:
    """Whether these are the same actions, of microbatches a period later."""
    return all(
        one[:2] == other[:2] and one.microbatch + period == other.microbatch
        for one, other in zip(actions, later, strict=True)
    )
