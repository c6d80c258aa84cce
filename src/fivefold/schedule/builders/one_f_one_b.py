"""1F1B: warm up just deep enough, then one forward, one backward, so that at most p microbatches are alive."""

from fivefold.schedule.actions import BACKWARD, FORWARD, Action
from fivefold.schedule.record import Record
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import Order, wire


def one_f_one_b(p: int, m: int) -> Schedule:
    """Rank r holds min(m, p - r) activations; the bubble is (p - 1)(F + B). Fewer microbatches than ranks work too."""
    orders = [_order(p, m, rank) for rank in range(p)]
    peak = tuple(min(m, p - rank) for rank in range(p))
    return wire("1f1b", Placement.single(p), m, orders, promise=Promise(peak, slots=3 * (m + p - 1)))


def _order(p: int, m: int, rank: int) -> Order:
    forwards = [Action(FORWARD, rank, k) for k in range(m)]
    backwards = [Action(BACKWARD, rank, k) for k in range(m)]
    warm_up = min(m, p - 1 - rank)
    steady = m - warm_up

    # Warm-up: forwards alone. Steady state: one forward, one backward. Cool-down: the remaining backwards.
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
        order += forward, backward
    return order + backwards[steady:]


ONE_F_ONE_B = Record("1f1b", lambda r: one_f_one_b(r.p, r.m), bubble="(p-1)(F+B)", planned=(1,))
