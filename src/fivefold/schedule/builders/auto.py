"""auto: a greedy zero-bubble schedule for the durations at hand (after Qi et al. 2023, section 3).

The handcrafted schedules assume that all stages take the same time. `auto` takes the durations of each stage, the
link and a memory limit, plays the pipeline forward under many policies, and keeps the order that is fastest on the
clock of `simulate`. The handcrafted orders with one stage per rank compete on the same clock, so `auto` is never slower
than those that fit into its memory; and since `naive` always fits and never deadlocks, there is always a winner.
"""

from collections.abc import Iterator
from itertools import product

from fivefold.schedule.builders.gpipe import gpipe
from fivefold.schedule.builders.greedy import Fill, Player, Policy, Task
from fivefold.schedule.builders.naive import naive
from fivefold.schedule.builders.one_f_one_b import one_f_one_b
from fivefold.schedule.builders.zero_bubble import zb_h1, zb_h2
from fivefold.schedule.clock import run
from fivefold.schedule.costs import Costs
from fivefold.schedule.record import Record
from fivefold.schedule.schedule import Placement, Promise, Schedule, peak_live
from fivefold.schedule.simulate import Simulation
from fivefold.schedule.wiring import Order, wire
from fivefold.support.errors import UserError

FILLS: tuple[Fill, ...] = ("any", "longest")
HANDCRAFTED = (zb_h1, zb_h2, one_f_one_b, gpipe, naive)


def auto(p: int, m: int, costs: Costs | None = None, memory: int | None = None) -> Schedule:
    """The best greedy schedule, with at most `memory` activations per rank (by default p, as 1F1B's first rank)."""
    costs = costs or Costs.even(Placement.single(p))
    limit = p if memory is None else memory
    if limit < 1:
        raise UserError(f"auto cannot work with room for {limit} activations; give at least 1 (1f1b holds up to {p})")
    if len(costs.f) != p:
        raise UserError(f"auto has one stage per rank, {p} in total, and the costs are those of {len(costs.f)} stages")
    return _fastest(Task(p, m, costs, limit)).schedule


def _fastest(task: Task) -> Simulation:
    """The best of all candidates."""
    placement, promise = Placement.single(task.p), Promise((min(task.m, task.limit),) * task.p)
    found: list[Simulation] = []
    seen: list[list[Order]] = []
    for orders in _candidates(task):
        if orders in seen:
            continue
        seen.append(orders)
        schedule = wire("auto", placement, task.m, orders, promise=promise)
        result = run(schedule, task.costs)
        if result.blocks:  # no overlap: what `check` proves is for receives posted where they stand
            continue
        found.append(Simulation(schedule, task.costs, result))
        if found[-1].makespan <= task.shortest() * (1 + 1e-9) and found[-1].bubble_span <= 1e-9:
            break
    return min(found, key=_merit)


def _candidates(task: Task) -> Iterator[list[Order]]:
    for build in HANDCRAFTED:
        schedule = build(task.p, task.m)
        if max(map(peak_live, schedule.ranks)) <= task.limit:
            yield [list(schedule.compute(rank)) for rank in range(task.p)]
    for policy in policies(task):
        yield Player(task, policy).play()


def policies(task: Task) -> Iterator[Policy]:
    """Run ahead until the first gradient could be back, three quarters or half of that, or as far as memory goes."""
    depths = [task.depth(share) for share in (1.0, 0.75, 0.5)] + [(task.m,) * task.p]
    for depth, fill, forward_first in product(dict.fromkeys(depths), FILLS, (True, False)):
        yield Policy(depth, fill, forward_first)


def _merit(simulation: Simulation) -> tuple[float, float, float]:
    """Shortest first; among equals the smallest bubble, then the least memory."""
    # Rounded, so that the dust of adding in another order does not decide.
    makespan, bubble = float(f"{simulation.makespan:.9g}"), round(simulation.bubble_span, 9)
    return makespan, bubble, max(simulation.peak_activations)


AUTO = Record(
    "auto",
    lambda r: auto(r.p, r.m, r.costs, r.memory),
    splits=True,  # as a rule: where the stages call for it, a whole backward wins
    options=("memory",),
    weighs=True,
    fill=0.4,
)
