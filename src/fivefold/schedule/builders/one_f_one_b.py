"""1F1B: warm up just deep enough, then one forward, one backward, so that at most p microbatches are alive."""

from fivefold.schedule.actions import BACKWARD, FORWARD, Action
from fivefold.schedule.record import Record
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import Order, wire


def one_f_one_b(p: int, m: int) -> Schedule:
    """Rank r holds min(m, p - r) activations; the bubble is (p - 1)(F + B). Fewer microbatches than ranks work too."""
    orders = []
    for rank in range(p):
        forwards, backwards = ([Action(kind, rank, k) for k in range(m)] for kind in (FORWARD, BACKWARD))
        orders.append(one_by_one(forwards, backwards, warm_up=min(m, p - 1 - rank)))
    peak = tuple(min(m, p - rank) for rank in range(p))
    return wire("1f1b", Placement.single(p), m, orders, promise=Promise(peak, slots=3 * (m + p - 1)))


def one_by_one(forwards: Order, backwards: Order, warm_up: int) -> Order:
    """Warm-up: forwards alone. Steady state: one forward, one backward. Cool-down: the remaining backwards."""
    order, steady = forwards[:warm_up], len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
        order += forward, backward
    return order + backwards[steady:]


ONE_F_ONE_B = Record("1f1b", lambda r: one_f_one_b(r.p, r.m), bubble="(p-1)(F+B)", planned=(1,))
