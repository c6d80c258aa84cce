"""Data parallelism's part of a step: gather parameters, reduce gradients, step the optimizer, each where it is due.

A pipeline schedule ends with the last weight gradient; what follows depends on how the data-parallel group shares
parameters, gradients and optimizer state (ZeRO stages 0 to 2; stage 3 gathers inside its blocks, not between actions).
"""

from dataclasses import replace

from fivefold.schedule.actions import COMPUTE, FORWARD, GATHER, LAST_READERS, REDUCE, STEP, Action
from fivefold.schedule.schedule import Schedule
from fivefold.schedule.wiring import Order
from fivefold.support.errors import UserError


def with_zero(schedule: Schedule, zero: int) -> Schedule:
    """The same schedule with REDUCE once a gradient is final, STEP at the end and, from stage 1 on, GATHER at first."""
    if zero not in (0, 1, 2):
        raise UserError(
            f"zero={zero} cannot be written into a schedule; use 0, 1 or 2 (stage 3 gathers block by block)"
        )
    return replace(schedule, ranks=tuple(tuple(_extend(list(order), zero)) for order in schedule.ranks))


def _extend(order: Order, zero: int) -> Order:
    unreduced: dict[int, int] = {}  # stage -> weight gradients still to come
    for action in order:
        if action.kind in LAST_READERS:
            unreduced[action.stage] = unreduced.get(action.stage, 0) + 1
    gathered = set() if zero else set(unreduced)

    extended: Order = []
    late: Order = []  # what is due before the rank computes on: behind the pair it belongs to, and behind its sends
    for action in order:
        if late and action.kind in COMPUTE and not extended[-1].joined:
            extended += late
            late.clear()
        if action.kind is FORWARD and action.stage not in gathered:
            gathered.add(action.stage)
            extended.append(Action(GATHER, action.stage))
        extended.append(action)
        if action.kind in LAST_READERS:
            unreduced[action.stage] -= 1
            if zero == 2:
                late.append(Action(REDUCE, action.stage, action.microbatch))
            elif unreduced[action.stage] == 0:
                late.append(Action(REDUCE, action.stage))
    return extended + late + [Action(STEP, stage) for stage in sorted(unreduced)]
