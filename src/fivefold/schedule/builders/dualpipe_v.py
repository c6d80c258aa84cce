"""DualPipeV: DeepSeek's DualPipe cut in half; forwards and backwards of different microbatches run overlapped.

V placement. In the steady state every forward is joined with a whole backward of the other chunk (F&B), so that
the messages of experts inside one hide under the compute of the other (`pairs.py` has the rule); `--times fb=` says how
long an overlapped pair takes. Deferred weight gradients wait in a FIFO queue.
"""

from fivefold.schedule.builders.in_words import InWords
from fivefold.schedule.record import Record, vee
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import Order, wire
from fivefold.support.errors import UserError


def dualpipe_v(p: int, m: int) -> Schedule:
    """A rank holds 2p + 1 chunk activations; the bubble is (p - 1)(F&B + B - 3W) in chunk times."""
    least = DUALPIPE_V.least * p
    if m < least:
        raise UserError(
            f"dualpipe-v needs at least 2p={least} microbatches to have forwards and backwards to pair, and there are "
            f"{m}; use zb-v, or at least {least} microbatches"
        )
    orders = [_order(p, m, rank) for rank in range(p)]
    promise = Promise((min(2 * m, 2 * p + 1),) * p, slots=6 * m + 2 * (p - 1))
    return wire("dualpipe-v", Placement.vee(p), m, orders, promise=promise)


def _order(p: int, m: int, r: int) -> Order:
    """DeepSeek's eight phases."""
    rank, below = InWords(p, r), p - r - 1
    # 1: F0 until the first activation has reached the last rank.
    rank.do("F0", times=2 * below)
    # 2: F0 F1, as the first microbatches come up again.
    rank.do("F0", "F1", times=r + 1)
    # 3: I1 W1 F1: the first gradients, split, so that the rank above has its own soon.
    rank.do("I1", "W1", "F1", times=below)
    # 4, the steady state: F0&B1 F1&B0. The last rank feeds itself: its first backward needs the forward right before
    # it, so they cannot overlap.
    first = ("F0&B1",) if below else ("F0", "B1")
    rank.do(*first, "F1&B0")
    rank.do("F0&B1", "F1&B0", times=m - 2 * p + r)
    # 5: B1 F1&B0, as no new microbatch comes in.
    rank.do("B1", "F1&B0", times=below)
    # 6: B1 B0; after the first half only their I, with the W deferred to fill the tail.
    gradients = [f"{'B' if step <= r else 'I'}{1 - step % 2}" for step in range(2 * (r + 1))]
    rank.do(*gradients)
    # 7: W I0: deferred weight gradients fill the gaps, the one that has waited longest first.
    deferred = [f"W{word[1]}" for word in gradients if word[0] == "I"] + ["W0"] * below
    for word in deferred[:below]:
        rank.do(word, "I0")
    # 8: the weight gradients that are left.
    rank.do(*deferred[below:])
    return rank.written


DUALPIPE_V = Record(
    "dualpipe-v",
    lambda r: dualpipe_v(r.p, r.m),
    vee,
    chunks=2,
    splits=True,
    least=2,
    bubble="(p-1)(F&B+B-3W)/2",
    joins=True,
    fill=0.7,
    live=lambda p, m, v: p + 1.0,
    planned=(2,),
)
