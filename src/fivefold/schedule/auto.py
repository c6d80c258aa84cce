"""auto: a greedy zero-bubble schedule for the durations at hand (after Qi et al. 2023, section 3).

The handcrafted schedules assume that all stages take the same time. This one takes the durations of each stage, the
time of a message and a memory limit, and plays the pipeline forward under many policies; the best result is kept. The
handcrafted ones compete, so `auto` is never worse than those that fit into its memory.
"""

from collections.abc import Iterator
from itertools import product

from fivefold.errors import UserError
from fivefold.schedule.costs import Costs
from fivefold.schedule.engine import run
from fivefold.schedule.greedy import Attempt, Fill, Policy, Problem, play
from fivefold.schedule.schedule import Placement, Promise, Schedule, peak_live
from fivefold.schedule.wiring import wire
from fivefold.schedule.zero_bubble import zb_h1, zb_h2

FILLS: tuple[Fill, ...] = ("any", "longest")


def auto(p: int, m: int, costs: Costs | None = None, memory: int | None = None) -> Schedule:
    """The best greedy schedule, with at most `memory` activations per rank (by default p, as 1F1B's first rank)."""
    costs = costs or Costs.even(Placement.single(p))
    limit = p if memory is None else memory
    if limit < 1:
        raise UserError(f"auto cannot work with room for {limit} activations; give at least 1 (1f1b holds up to {p})")
    if len(costs.f) != p:
        raise UserError(f"auto has one stage per rank, {p} in all, and the costs are those of {len(costs.f)} stages")
    problem = Problem(p, m, costs, limit)
    attempts = (play(problem, policy) for policy in _policies(problem))
    best = _best([*_handcrafted(problem)], attempts, problem.shortest())
    return _wired(problem, best)


def _best(handcrafted: list[Attempt], attempts: Iterator[Attempt], shortest: float) -> Attempt:
    best = min([next(attempts), *handcrafted], key=_merit)
    for attempt in attempts:
        best = min(best, attempt, key=_merit)
        if best.makespan <= shortest * (1 + 1e-9) and best.bubble <= 1e-9 * shortest:
            break
    return best


def _merit(attempt: Attempt) -> tuple[float, float, int]:
    """Shortest first; among equals the smallest bubble, then the least memory."""
    # Rounded, so that the dust of adding in another order does not decide.
    makespan, bubble = float(f"{attempt.makespan:.9g}"), round(attempt.bubble / attempt.makespan, 9)
    return makespan, bubble, max(map(peak_live, attempt.orders))


def _handcrafted(problem: Problem) -> Iterator[Attempt]:
    for build in (zb_h1, zb_h2):
        schedule = build(problem.p, problem.m)
        result = run(schedule, problem.costs)
        if not result.blocks and max(schedule.promise.peak or ()) <= problem.limit:
            bubble = max(lane.last - lane.first - lane.busy for lane in result.lanes)
            yield Attempt(result.makespan, bubble, [list(schedule.compute(rank)) for rank in range(problem.p)])


def _policies(problem: Problem) -> Iterator[Policy]:
    """Run ahead until the first gradient could be back, three quarters or half of that, or as far as memory goes."""
    depths = [problem.depth(share) for share in (1.0, 0.75, 0.5)] + [(problem.m,) * problem.p]
    for depth, fill, forward_first in product(dict.fromkeys(depths), FILLS, (True, False)):
        yield Policy(depth, fill, forward_first)


def _wired(problem: Problem, best: Attempt) -> Schedule:
    """With as many buffers as it takes to run at the speed that was found: uneven stages let messages pile up."""
    promise = Promise((min(problem.m, problem.limit),) * problem.p)
    buffers = 2
    while True:
        placement = Placement.single(problem.p)
        schedule = wire("auto", placement, problem.m, best.orders, buffers=buffers, promise=promise)
        result = run(schedule, problem.costs)
        if (not result.blocks and result.makespan <= best.makespan * (1 + 1e-9)) or buffers > problem.m:
            return schedule
        buffers *= 2
