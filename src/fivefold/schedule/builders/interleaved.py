"""Interleaved 1F1B: v chunks per rank, so that the pipeline fills v times faster; with Llama 3's tunable group size N.

Microbatches go through the chunks in groups of N: N microbatches through chunk 0, the same N through chunk 1, and on.
N = p is Megatron's order. A larger N gives each message more time to travel, for (v - 1)(N - p) more activations; the
number of microbatches need not divide by it, as long as the last group still fills the pipeline.
"""

from fivefold.schedule.actions import BACKWARD, FORWARD, Action
from fivefold.schedule.builders.one_f_one_b import one_by_one
from fivefold.schedule.record import Record
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import Order, wire
from fivefold.support.errors import UserError
from fivefold.support.formatting import either


def interleaved(p: int, m: int, v: int = 2, group: int | None = None) -> Schedule:
    """Rank r holds (v-1)N + 2(p-1-r) + 1 chunk activations; the bubble is (p - 1)(F + B) / v.

    Without a `group` it takes the smallest legal N: p when p divides m.
    """
    if m < INTERLEAVED.least * p:
        raise UserError(
            f"interleaved needs at least p={p} microbatches, and there are {m}: a chunk's group would run dry before "
            "its first microbatch is back; use 1f1b, or more microbatches"
        )
    legal = legal_groups(p, m)
    if group is None:
        group = legal[0]
    if group not in legal:
        raise UserError(_refusal(p, m, group, legal))
    return interleaved_unchecked(p, m, v, group)


def legal_groups(p: int, m: int) -> list[int]:
    """The group sizes that work: every group, the last one too, fills the pipeline."""
    return [n for n in range(p, m + 1) if m % n == 0 or m % n >= p]


def _refusal(p: int, m: int, group: int, legal: list[int]) -> str:
    closest = sorted(sorted(legal, key=lambda n: abs(n - group))[:3])
    instead = f"use N={either(closest)}"
    if group < p:
        reason = f"is below p={p}: a chunk would wait for microbatches that wait for it; that deadlocks or stalls"
    elif group > m:
        reason = f"is above the number of microbatches, {m}"
    else:
        reason = (
            f"leaves a last group of {m % group} of the {m} microbatches, fewer than p={p} ranks: that deadlocks or "
            "doubles the bubble"
        )
    return f"group size N={group} {reason}; {instead}"


def interleaved_unchecked(p: int, m: int, v: int, group: int) -> Schedule:
    """The order for any group size, also one that the checker will refuse."""
    orders = [_order(p, m, v, group, rank) for rank in range(p)]
    peak = tuple(min(m * v, (v - 1) * group + 2 * (p - 1 - rank) + 1) for rank in range(p))
    promise = Promise(peak, slots=3 * (m * v + p - 1))
    return wire("interleaved", Placement.looped(p, v), m, orders, promise=promise)


def _order(p: int, m: int, v: int, group: int, rank: int) -> Order:
    passes = [
        (chunk, microbatch)
        for first in range(0, m, group)
        for chunk in range(v)
        for microbatch in range(first, min(m, first + group))
    ]
    forwards = [Action(FORWARD, chunk * p + rank, k) for chunk, k in passes]
    backwards = [Action(BACKWARD, (v - 1 - chunk) * p + rank, k) for chunk, k in passes]
    return one_by_one(forwards, backwards, warm_up=min(m * v, 2 * (p - 1 - rank) + (v - 1) * group))


INTERLEAVED = Record(
    "interleaved",
    lambda r: interleaved(r.p, r.m, r.chunks, r.group),
    chunks=2,
    any_chunks=True,
    least=1,
    also="p <= N <= m, and m % N is 0 or >= p",
    options=("group",),
    bubble="(p-1)(F+B)/v",
    live=lambda p, m, v: p + (p - 1) / v,
    planned=(2, 4, 8),
)
