"""ZB-V: zero bubble in 1F1B's memory, by placing stages in a V (Qi et al. 2023).

Rank r owns stages r and 2p-1-r, so that the last rank of the way down is the first of the way up, and rank 0 sees the
loss of a microbatch as soon as it is there.
"""

from fivefold.schedule.builders.in_words import InWords
from fivefold.schedule.record import Record, vee
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import Order, wire


def zb_v(p: int, m: int) -> Schedule:
    """Every rank holds p whole activations; no bubble in any rank's span when F = I = W and m >= 2p - 1."""
    orders = [_order(p, m, rank) for rank in range(p)]
    promise = Promise((min(2 * m, 2 * p),) * p, slots=6 * m + p - 1 if m >= 2 * p - 1 else None)
    return wire("zb-v", Placement.vee(p), m, orders, promise=promise)


def _order(p: int, m: int, r: int) -> Order:
    """The paper's phases: warm-up, steady state, cool-down."""
    rank = InWords(p, r)
    n = max(m, 2 * p - 1)  # the pattern needs this many microbatches; those beyond m are left out again
    # Warm-up: down the V, then down and up in turn, then the first gradients.
    rank.do("F0", times=2 * (p - r) - 1)
    rank.do("F1", "F0", times=r)
    rank.do("F1", "I1", "W1", times=p - r)
    # Steady state: every gradient makes room for a forward.
    while rank.forwards(1) < rank.forwards(0) or rank.forwards(0) < n:
        if rank.forwards(0) < n:
            rank.do("F0")
        rank.do("I0", "W0", "F1", "I1", "W1")
    # Cool-down: input gradients first, because other ranks wait for them; then the weight gradients that are left.
    rank.do("I0", "I1", times=r)
    rank.do("I0", "W0", times=p - r)
    rank.do("W1", times=n - rank.weight_grads(1))
    rank.do("W0", times=n - rank.weight_grads(0))
    return [action for action in rank.written if action.microbatch < m]


ZB_V = Record(
    "zb-v",
    lambda r: zb_v(r.p, r.m),
    vee,
    chunks=2,
    splits=True,
    bubble="span 0 if F=I=W",
    fill=0.3,
    waits=True,
    planned=(2,),
)
