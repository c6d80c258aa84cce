"""auto: a greedy zero-bubble schedule for the durations at hand (after Qi et al. 2023, section 3).

The handcrafted schedules assume that all stages take the same time. `auto` takes the durations of each stage, the
link and a memory limit, plays the pipeline forward under many policies, and keeps the order that is fastest on the
clock of `simulate`. The handcrafted orders with one stage per rank compete on the same clock, so `auto` is never slower
than those that fit into its memory; and since `naive` always fits and never deadlocks, there is always a winner.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from fivefold.schedules.actions import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Kind
from fivefold.schedules.classic import gpipe, naive, one_f_one_b
from fivefold.schedules.clock import run
from fivefold.schedules.communication import Order, wire
from fivefold.schedules.costs import Costs
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.schedule import Bounds, Placement, Schedule, peak_live
from fivefold.schedules.simulate import Simulation
from fivefold.schedules.zero_bubble import zb_h1, zb_h2
from fivefold.support.errors import UserError

# ---- greedy ---------------------------------------------------------------------------------------------------------
# The greedy player behind `auto`: whenever a rank is free, decide what it runs next.
#
# An input gradient goes first, because others wait for it; a forward keeps the pipeline fed, as far as memory allows;
# a weight gradient fills the gaps. Where the right answer depends on the durations, a `GreedyPolicy` gives it.


Fill = Literal["longest", "any"]


@dataclass(frozen=True)
class AutoTask:
    """The problem that `auto` solves: so many ranks and microbatches, their costs, at most `limit` activations each."""

    p: int
    m: int
    costs: Costs
    limit: int

    @property
    def hop(self) -> float:
        """How long a message takes."""
        return self.costs.link.latency + self.costs.link.occupancy

    def lower_bound(self) -> float:
        """No makespan is below this: a rank waits for its first forward, and then has all its work to do."""
        f, i, w, b = self.costs.f, self.costs.i, self.costs.w, self.costs.b
        work = [f[rank] + min(i[rank] + w[rank], b[rank]) for rank in range(self.p)]
        return max(sum(f[:rank]) + rank * self.hop + self.m * work[rank] for rank in range(self.p))

    def depth(self, share: float) -> tuple[int, ...]:
        """How many forwards each rank runs in this share of a round trip, besides the one that is under way."""
        forwards = [self.round_trip(rank) / max(self.costs.f[rank], 1e-12) for rank in range(self.p)]
        return tuple(min(self.m, 1 + math.ceil(share * count - 1e-9)) for count in forwards)

    def round_trip(self, rank: int) -> float:
        """From the end of a forward to the arrival of its gradient, if nobody else is in the way."""
        beyond = range(rank + 1, self.p)
        return sum(self.costs.f[s] + self.costs.i[s] for s in beyond) + 2 * self.hop * len(beyond)


@dataclass(frozen=True)
class GreedyPolicy:
    """The decisions whose best answer depends on the durations."""

    depth: tuple[int, ...]  # how many forwards a rank may be ahead of its input gradients
    fill: Fill  # gaps too short for a W that get one all the same: where the wait would be the longest, or any
    forward_first: bool  # when a forward and a gradient are both ready


class _GreedyRank:
    """The state of one rank. The arrival of an input is known once the action that produces it has begun."""

    def __init__(self) -> None:
        self.forwards: list[float] = []  # when the input of forward k arrives, as far as known
        self.gradients: list[float] = []  # when the output gradient of microbatch k arrives, as far as known
        self.begun = {FORWARD: 0, INPUT_GRAD: 0, WEIGHT_GRAD: 0}
        self.free = 0.0  # when its last action ends
        self.started = False
        self.waited = 0.0  # idle time between its actions, in total
        self.asleep = False  # no arrival is known that it could wait for

    @property
    def live(self) -> int:
        return self.begun[FORWARD] - self.begun[WEIGHT_GRAD]


class Player:
    """Plays all microbatches through the pipeline under one policy."""

    def __init__(self, task: AutoTask, policy: GreedyPolicy) -> None:
        self.task, self.policy = task, policy
        self.costs, self.hop = task.costs, task.hop
        self.durations = {kind: task.costs.of(kind) for kind in (FORWARD, INPUT_GRAD, WEIGHT_GRAD)}
        self.ranks = [_GreedyRank() for _ in range(task.p)]
        self.ranks[0].forwards = [0.0] * task.m
        self.orders: list[Order] = [[] for _ in range(task.p)]
        self.agenda = [(0.0, rank) for rank in range(task.p)]

    def play(self) -> list[Order]:
        """The compute order of each rank."""
        while self.agenda:
            now, rank = heapq.heappop(self.agenda)
            kind = self.choose(rank, now)
            if kind is None:
                self.rest(rank, now)
            else:
                self.begin(rank, kind, now)
        return self.orders

    def choose(self, rank: int, now: float) -> Kind | None:
        """What the rank runs now; None: it waits."""
        state, policy = self.ranks[rank], self.policy
        forward, gradient = self.arrivals(rank)
        full = state.live >= self.task.limit
        deferred = state.begun[INPUT_GRAD] > state.begun[WEIGHT_GRAD]
        if gradient <= now:
            return FORWARD if policy.forward_first and forward <= now and not full else INPUT_GRAD
        if full:
            if deferred and forward < math.inf:
                return WEIGHT_GRAD  # to make room
            forward = math.inf
        if forward <= now:
            return FORWARD
        if deferred and self.worth_filling(rank, now):
            return WEIGHT_GRAD
        return None

    def arrivals(self, rank: int) -> tuple[float, float]:
        """When the next forward and the next input gradient can run; infinity when that is not known yet."""
        state = self.ranks[rank]
        f, i = state.begun[FORWARD], state.begun[INPUT_GRAD]
        held_back = f - i >= self.policy.depth[rank] or f >= len(state.forwards)
        forward = math.inf if held_back else state.forwards[f]
        gradient = state.gradients[i] if i < len(state.gradients) else math.inf
        return forward, gradient

    def worth_filling(self, rank: int, now: float) -> bool:
        gap = self.next_arrival(rank, now) - now
        if gap >= self.costs.w[rank] - 1e-9 or self.policy.fill == "any":
            return True
        return self.ranks[rank].waited + gap > max(state.waited for state in self.ranks)

    def next_arrival(self, rank: int, now: float) -> float:
        state = self.ranks[rank]
        forward, gradient = self.arrivals(rank)
        if state.live >= self.task.limit:
            forward = math.inf
        return min((time for time in (forward, gradient) if time > now), default=math.inf)

    def rest(self, rank: int, now: float) -> None:
        """Wait for the next known arrival, or sleep until `wake`."""
        state, until = self.ranks[rank], self.next_arrival(rank, now)
        if until == math.inf:
            state.asleep = True
        else:
            heapq.heappush(self.agenda, (until, rank))

    def begin(self, rank: int, kind: Kind, now: float) -> None:
        state = self.ranks[rank]
        if state.started:
            state.waited += now - state.free
        state.started = True
        state.free = now + self.durations[kind][rank]
        self.orders[rank].append(Action(kind, rank, state.begun[kind]))
        state.begun[kind] += 1
        if kind is FORWARD and rank == self.task.p - 1:
            state.gradients.append(state.free)  # the loss needs no message
        elif kind is FORWARD:
            self.ranks[rank + 1].forwards.append(state.free + self.hop)
            self.wake(rank + 1, now)
        elif kind is INPUT_GRAD and rank > 0:
            self.ranks[rank - 1].gradients.append(state.free + self.hop)
            self.wake(rank - 1, now)
        heapq.heappush(self.agenda, (state.free, rank))

    def wake(self, rank: int, now: float) -> None:
        state = self.ranks[rank]
        if state.asleep:
            state.asleep = False
            heapq.heappush(self.agenda, (max(now, state.free), rank))


# ---- auto -----------------------------------------------------------------------------------------------------------


FILLS: tuple[Fill, ...] = ("any", "longest")
HANDCRAFTED = (zb_h1, zb_h2, one_f_one_b, gpipe, naive)


def auto(p: int, m: int, costs: Costs | None = None, memory: int | None = None) -> Schedule:
    """The best greedy schedule, with at most `memory` activations per rank (by default p, as 1F1B's first rank)."""
    costs = costs or Costs.even(Placement.single(p))
    limit = p if memory is None else memory
    if limit < 1:
        raise UserError(
            f"auto cannot work with room for {limit} activations; give at least 1 (1f1b holds up to {p})",
            "schedule.limit",
        )
    if len(costs.f) != p:
        raise UserError(
            f"auto has one stage per rank, {p} in total, and the costs have {len(costs.f)} stages",
            "schedule.costs",
        )
    return _fastest(AutoTask(p, m, costs, limit)).schedule


def _fastest(task: AutoTask) -> Simulation:
    """The best of all candidates."""
    placement, promise = Placement.single(task.p), Bounds((min(task.m, task.limit),) * task.p)
    candidates: list[Simulation] = []
    seen: list[list[Order]] = []
    for orders in _candidates(task):
        if orders in seen:
            continue
        seen.append(orders)
        schedule = wire("auto", placement, task.m, orders, promise=promise)
        result = run(schedule, task.costs)
        if result.blocks:  # a deadlock where the link does not overlap; `check` proves receives posted as listed
            continue
        candidates.append(Simulation(schedule, task.costs, result))
        if candidates[-1].makespan <= task.lower_bound() * (1 + 1e-9) and candidates[-1].bubble_span <= 1e-9:
            break  # none can be better
    return min(candidates, key=_merit)


def _candidates(task: AutoTask) -> Iterator[list[Order]]:
    for build in HANDCRAFTED:
        schedule = build(task.p, task.m)
        if max(map(peak_live, schedule.ranks)) <= task.limit:
            yield [list(schedule.compute(rank)) for rank in range(task.p)]
    for policy in policies(task):
        yield Player(task, policy).play()


def policies(task: AutoTask) -> Iterator[GreedyPolicy]:
    """Forwards run ahead for a whole round trip, for three quarters or half of it, or as far as memory allows."""
    depths = [task.depth(share) for share in (1.0, 0.75, 0.5)] + [(task.m,) * task.p]
    for depth, fill, forward_first in product(dict.fromkeys(depths), FILLS, (True, False)):
        yield GreedyPolicy(depth, fill, forward_first)


def _merit(simulation: Simulation) -> tuple[float, float, float]:
    """Shortest first; among equals the smallest bubble, then the least memory."""
    # Rounded, so that rounding errors of sums in another order do not decide.
    makespan, bubble = float(f"{simulation.makespan:.9g}"), round(simulation.bubble_span, 9)
    return makespan, bubble, max(simulation.peak_activations)


AUTO = ScheduleInfo(
    "auto",
    lambda r: auto(r.p, r.m, r.costs, r.memory),
    splits=True,  # as a rule: where the stages call for it, a whole backward wins
    options=("memory",),
    uses_stage_times=True,
    fill=0.4,
)
