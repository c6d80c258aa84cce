"""`simulate`: how long a schedule takes, where its bubbles are, and what it holds in memory.

Two bubbles, because papers and people mean different ones:

  bubble_makespan  the share of all ranks' time, from time 0 to the last end, in which they do not compute:
                   1 - sum of busy / (p x makespan). It is what a training step pays, since the optimizer waits for all.
  bubble_span      taken on the rank that waits longest between its own first start and last end: that wait, as a share
                   of that span. The zero-bubble papers quote it; it counts neither the late start of the last ranks nor
                   the early end of others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from fivefold.schedules.actions import FORWARD, GRADIENT_MAKERS, LAST_READERS, WEIGHT_GRAD, Action
from fivefold.schedules.clock import BusySpan, ClockRun, Lane, run
from fivefold.schedules.costs import Costs
from fivefold.schedules.deadlock import deadlock_sentence
from fivefold.schedules.schedule import Schedule
from fivefold.support.errors import UserError


class RankTime(NamedTuple):
    """A rank's share of the makespan: `busy` + `wait` (between its actions) + `idle` (before and after) = makespan."""

    busy: float
    wait: float
    idle: float

    @property
    def span(self) -> float:
        """From the rank's first start to its last end."""
        return self.busy + self.wait


class DrawnSpan(NamedTuple):
    """One box of a picture: an action, or an F and `beside` it the B of its pair."""

    action: Action
    start: float
    end: float
    beside: Action | None = None


@dataclass(frozen=True)
class Simulation:
    """A schedule that ran on a clock. Its figures are computed when they are read."""

    schedule: Schedule
    costs: Costs
    run: ClockRun

    @property
    def makespan(self) -> float:
        """The time at which the last action ends."""
        return self.run.makespan

    @cached_property
    def timeline(self) -> list[list[BusySpan]]:
        """Per rank, every compute action with its start and end."""
        return [lane.spans() for lane in self.run.lanes]

    def drawn(self, rank: int) -> Iterator[DrawnSpan]:
        """A rank's actions as they are drawn: the halves of a joined pair as one box if overlapping saves time, else
        one after the other."""
        spans = iter(self.timeline[rank])
        for action, start, end in spans:
            if not action.joined:
                yield DrawnSpan(action, start, end)
                continue
            backward = next(spans).action
            f, b = self.costs.f[action.stage], self.costs.b[backward.stage]
            if end - start < (1 - 1e-9) * (f + b):
                yield DrawnSpan(action, start, end, backward)
            else:
                yield DrawnSpan(action, start, start + f)
                yield DrawnSpan(backward, end - b, end)

    @cached_property
    def ranks(self) -> list[RankTime]:
        """Where the time of each rank goes."""
        spans = [(lane.busy, lane.last - lane.first) for lane in self.run.lanes]
        # A rounding error must not make a wait negative.
        return [RankTime(busy, max(0.0, span - busy), self.makespan - span) for busy, span in spans]

    @property
    def bubble_makespan(self) -> float:
        busy = sum(rank.busy for rank in self.ranks)
        return 1 - busy / (len(self.ranks) * self.makespan) if self.makespan else 0.0

    @property
    def bubble_span(self) -> float:
        longest = max(self.ranks, key=lambda rank: rank.wait)
        return longest.wait / longest.span if longest.span else 0.0

    @cached_property
    def memory(self) -> list[list[tuple[float, float]]]:
        """Per rank the steps of its live activations, as (time, activations from then on), in units of A."""
        return [list(self._memory_steps(lane)) for lane in self.run.lanes]

    @property
    def peak_activations(self) -> list[float]:
        """Per rank the most live activations, in units of A: what one microbatch keeps on a whole rank."""
        return [max((live for _, live in steps), default=0.0) for steps in self.memory]

    def _memory_steps(self, lane: Lane) -> Iterator[tuple[float, float]]:
        """A forward adds its activations when it starts, and the last reader frees them when it ends."""
        live, sizes = 0.0, self.costs.activation
        for action, start, end in zip(lane.actions, lane.starts, lane.ends, strict=True):
            if action.kind is FORWARD:
                live += sizes[action.stage]
                yield start, live
            elif action.kind in LAST_READERS:
                live -= sizes[action.stage]
                yield end, live


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run a schedule that `check` accepts on the clock.

    Without costs, each F, I and W of a whole rank takes 1 and messages take nothing.
    """
    costs = costs or Costs.even(schedule.placement)
    stages = schedule.placement.stages
    if len(costs.f) != stages:
        raise UserError(
            f"schedule {schedule.name} has {stages} stages, and the costs have {len(costs.f)}", "schedule.costs"
        )
    result = run(schedule, costs)
    if result.blocks:
        raise UserError(_deadlock_message(schedule, costs, result), "schedule.deadlock")
    return Simulation(schedule, costs, result)


def _deadlock_message(schedule: Schedule, costs: Costs, result: ClockRun) -> str:
    """Says which rank waits for which, and names the link's settings where the schedule runs without them."""
    sentence = f"schedule {schedule.name} deadlocks: {deadlock_sentence(result.blocks)}"
    link = costs.link
    causes = ["blocking sends (--sends blocking)"] * (link.sends == "blocking")
    causes += ["receives that are posted late (--no-overlap)"] * (not link.overlap)
    if not causes or run(schedule, replace(costs, link=replace(link, sends="eager", overlap=True))).blocks:
        return sentence
    return (
        f"{sentence}. The cause is {' and '.join(causes)}: it runs with eager sends and receives posted where they "
        "stand, which is how it is executed; time it with --sends eager --overlap, or naive, which never waits so"
    )


# ---- dependencies ---------------------------------------------------------------------------------------------------
# The actions whose results an action reads. (It also waits for the action before it on its own rank.)
#
#     lanes = [list(simulation.drawn(rank)) for rank in range(simulation.schedule.p)]
#     dependencies(simulation.schedule, lanes)[2][5]  # [(1, 4)]: span 5 of rank 2 reads what span 4 of rank 1 makes


SpanPosition = tuple[int, int]  # a rank, and the index of one of its spans


def dependencies(schedule: Schedule, lanes: Sequence[Sequence[DrawnSpan]]) -> list[list[list[SpanPosition]]]:
    """By rank and span, the spans whose results it reads; a joined pair in one span reads two."""
    stages, m = schedule.placement.stages, schedule.m
    # By stage and microbatch, the span that makes the output, and the one that makes the gradient of the input.
    outputs: list[list[SpanPosition | None]] = [[None] * m for _ in range(stages)]
    gradients: list[list[SpanPosition | None]] = [[None] * m for _ in range(stages)]
    for rank, lane in enumerate(lanes):
        for place, span in enumerate(lane):
            for action in (span.action, span.beside):
                if action is None:
                    continue
                if action.kind is FORWARD:
                    outputs[action.stage][action.microbatch] = rank, place
                elif action.kind in GRADIENT_MAKERS:
                    gradients[action.stage][action.microbatch] = rank, place

    def reads(action: Action) -> SpanPosition | None:
        """The span that makes a forward's input, a backward's output gradient, or what an I leaves for its W."""
        kind, stage, microbatch, _ = action
        if kind is FORWARD:
            return outputs[stage - 1][microbatch] if stage else None
        if kind in GRADIENT_MAKERS:
            return outputs[stage][microbatch] if stage == stages - 1 else gradients[stage + 1][microbatch]
        return gradients[stage][microbatch] if kind is WEIGHT_GRAD else None

    return [
        [[read for action in (span.action, span.beside) if action and (read := reads(action))] for span in lane]
        for lane in lanes
    ]
