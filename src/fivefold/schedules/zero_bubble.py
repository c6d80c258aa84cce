"""ZB-H1 and ZB-H2: split the backward, and fill the bubbles of 1F1B with weight gradients (Qi et al. 2023).

I, the input gradient, keeps the pipeline going; W, the weight gradient, can wait. Rank r defers its W by r (H1) or 2r
(H2) microbatches, so that each rank has just enough of them left to fill its own tail. H1 lives in 1F1B's memory; H2
warms up twice as deep and, where F, I and W take the same time, leaves no gap between its first and last action.

p is the number of ranks, m of microbatches.
"""

from fivefold.schedules.actions import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from fivefold.schedules.communication import Order, wire
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.schedule import Bounds, Placement, Schedule


def zb_h1(p: int, m: int) -> Schedule:
    """Every rank holds p activations; the bubble is (p - 1)(F + I - W)."""
    slots = max(3 * m + p - 1, 2 * (m + p) - 1)
    return _handcrafted("zb-h1", p, m, depth=1, promise=Bounds((min(m, p),) * p, slots))


def zb_h2(p: int, m: int) -> Schedule:
    """Every rank holds 2p - 1 activations; the bubble of its span is (p - 1)(F + I - 2W)."""
    slots = 3 * m + p - 1 if m >= 2 * p - 1 else None
    return _handcrafted("zb-h2", p, m, depth=2, promise=Bounds((min(m, 2 * p - 1),) * p, slots))


def _handcrafted(name: str, p: int, m: int, depth: int, promise: Bounds) -> Schedule:
    """The paper calls these two handcrafted."""
    orders = [_order(p, m, rank, depth) for rank in range(p)]
    return wire(name, Placement.single(p), m, orders, promise=promise)


def _order(p: int, m: int, rank: int, depth: int) -> Order:
    """1F1B's order with a warm-up `depth` times as deep, and each W `depth` times the rank's number behind its I."""
    warm_up = min(m, depth * (p - 1 - rank))
    delay = depth * rank

    order = [Action(FORWARD, rank, k) for k in range(warm_up)]
    # Steady state: F I W, with W `delay` microbatches behind; without F once all of them have run.
    for k in range(m):
        if warm_up + k < m:
            order.append(Action(FORWARD, rank, warm_up + k))
        order.append(Action(INPUT_GRAD, rank, k))
        if k >= delay:
            order.append(Action(WEIGHT_GRAD, rank, k - delay))
    # Cool-down: the delayed weight gradients fill the tail.
    return order + [Action(WEIGHT_GRAD, rank, k) for k in range(max(0, m - delay), m)]


ZB_H1 = ScheduleInfo(
    "zb-h1", lambda r: zb_h1(r.p, r.m), splits=True, bubble="(p-1)(F+I-W)", fill=0.4, waits=True, planned=(1,)
)
ZB_H2 = ScheduleInfo(
    "zb-h2",
    lambda r: zb_h2(r.p, r.m),
    splits=True,
    bubble="span (p-1)(F+I-2W)",
    fill=0.3,
    live=lambda p, m, v: 2 * p - 1,
)
