"""The schedules without a split backward: naive, GPipe, 1F1B, breadth-first, interleaved 1F1B.

A builder says in which order each rank computes; `wire` adds the sends and receives. Each schedule has a builder and
its `ScheduleInfo`. In all of them p is the number of ranks, m of microbatches, v of chunks (stages) of a rank; F and B
are the times of a forward and a backward pass.
"""

from fivefold.schedules.actions import BACKWARD, FORWARD, Action
from fivefold.schedules.communication import Order, wire
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.schedule import Bounds, Placement, Schedule
from fivefold.support.errors import UserError
from fivefold.support.text import either

# ---- naive ----------------------------------------------------------------------------------------------------------
# Naive model parallelism: one microbatch at a time, so that one rank works and the others wait. The baseline.


def naive(p: int, m: int) -> Schedule:
    """Every rank idles (p - 1)/p of the time, and holds one activation."""
    orders = [
        [Action(kind, rank, microbatch) for microbatch in range(m) for kind in (FORWARD, BACKWARD)] for rank in range(p)
    ]
    return wire("naive", Placement.single(p), m, orders, promise=Bounds((1,) * p, slots=3 * m * p))


NAIVE = ScheduleInfo(
    "naive",
    lambda r: naive(r.p, r.m),
    bubble="(p-1)/p of the time",
    refills=True,
    live=lambda p, m, v: 1,
)


# ---- gpipe ----------------------------------------------------------------------------------------------------------
# GPipe: all forwards, then all backwards.


def gpipe(p: int, m: int) -> Schedule:
    """The bubble is (p - 1)(F + B), a share of (p - 1)/(m + p - 1); every rank holds all m activations."""
    orders = [
        [Action(kind, rank, microbatch) for kind in (FORWARD, BACKWARD) for microbatch in range(m)] for rank in range(p)
    ]
    return wire("gpipe", Placement.single(p), m, orders, promise=Bounds((m,) * p, slots=3 * (m + p - 1)))


GPIPE = ScheduleInfo("gpipe", lambda r: gpipe(r.p, r.m), bubble="(p-1)(F+B)", live=lambda p, m, v: m)


# ---- 1f1b -----------------------------------------------------------------------------------------------------------
# 1F1B: warm up just deep enough, then one forward, one backward, so that at most p microbatches are alive.


def one_f_one_b(p: int, m: int) -> Schedule:
    """Rank r holds min(m, p - r) activations; the bubble is (p - 1)(F + B). Fewer microbatches than ranks work too."""
    orders = []
    for rank in range(p):
        forwards, backwards = ([Action(kind, rank, k) for k in range(m)] for kind in (FORWARD, BACKWARD))
        orders.append(one_by_one(forwards, backwards, warm_up=min(m, p - 1 - rank)))
    peak = tuple(min(m, p - rank) for rank in range(p))
    return wire("1f1b", Placement.single(p), m, orders, promise=Bounds(peak, slots=3 * (m + p - 1)))


def one_by_one(forwards: Order, backwards: Order, warm_up: int) -> Order:
    """Warm-up: forwards alone. Steady state: one forward, one backward. Cool-down: the remaining backwards."""
    order, steady = forwards[:warm_up], len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
        order += forward, backward
    return order + backwards[steady:]


ONE_F_ONE_B = ScheduleInfo("1f1b", lambda r: one_f_one_b(r.p, r.m), bubble="(p-1)(F+B)", planned=(1,))


# ---- breadth first --------------------------------------------------------------------------------------------------
# Breadth-first (looped) pipelining: GPipe on v chunks per rank. All microbatches pass chunk 0, then all chunk 1.


def breadth_first(p: int, m: int, v: int = 2) -> Schedule:
    """The bubble is (p - 1)(F + B)/v when m >= p; every rank holds all m activations of all its chunks.

    Its merit is that a chunk's weights are used in one go, so that ZeRO gathers and reduces each of them once.
    """
    orders = [_breadth_first_order(p, m, v, rank) for rank in range(p)]
    slots = 3 * ((v - 1) * max(m, p) + m + p - 1)  # with m < p a chunk waits for its first microbatch to come round
    return wire("bfs", Placement.looped(p, v), m, orders, promise=Bounds((m * v,) * p, slots))


def _breadth_first_order(p: int, m: int, v: int, rank: int) -> Order:
    """All microbatches chunk by chunk; backwards from the last chunk. A rank's chunk c is stage c p + rank."""
    forwards = [Action(FORWARD, chunk * p + rank, k) for chunk in range(v) for k in range(m)]
    backwards = [Action(BACKWARD, chunk * p + rank, k) for chunk in reversed(range(v)) for k in range(m)]
    return forwards + backwards


BREADTH_FIRST = ScheduleInfo(
    "bfs",
    lambda r: breadth_first(r.p, r.m, r.v),
    chunks=2,
    any_chunks=True,
    bubble="(p-1)(F+B)/v",
    live=lambda p, m, v: m,
)


# ---- interleaved ----------------------------------------------------------------------------------------------------
# Interleaved 1F1B: v chunks per rank, so that the pipeline fills v times faster; with Llama 3's tunable group size N.
#
# Microbatches go through the chunks in groups of N: N microbatches through chunk 0, the same N through chunk 1, and
# on. N = p is Megatron's order. A larger N gives each message more time to travel, for (v - 1)(N - p) more
# activations; the number of microbatches need not divide by it, as long as the last group still fills the pipeline.


def interleaved(p: int, m: int, v: int = 2, group: int | None = None) -> Schedule:
    """Rank r holds (v-1)N + 2(p-1-r) + 1 chunk activations; the bubble is (p - 1)(F + B) / v.

    Without a `group` it takes the smallest legal N: p when p divides m.
    """
    if m < INTERLEAVED.least * p:
        raise UserError(
            f"interleaved needs at least p={p} microbatches, and there are {m}: a chunk's group would run dry before "
            "its first microbatch is back; use 1f1b, or more microbatches",
            "layout.microbatches.schedule",
        )
    legal = legal_groups(p, m)
    if group is None:
        group = legal[0]
    if group not in legal:
        raise UserError(_refusal(p, m, group, legal), "schedule.group")
    return interleaved_unchecked(p, m, v, group)


def legal_groups(p: int, m: int) -> list[int]:
    """The group sizes that work: every group, the last one too, fills the pipeline."""
    return [n for n in range(p, m + 1) if m % n == 0 or m % n >= p]


def _refusal(p: int, m: int, group: int, legal: list[int]) -> str:
    """Why a group size does not work, and the nearest that do."""
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
    orders = [_interleaved_order(p, m, v, group, rank) for rank in range(p)]
    peak = tuple(min(m * v, (v - 1) * group + 2 * (p - 1 - rank) + 1) for rank in range(p))
    promise = Bounds(peak, slots=3 * (m * v + p - 1))
    return wire("interleaved", Placement.looped(p, v), m, orders, promise=promise)


def _interleaved_order(p: int, m: int, v: int, group: int, rank: int) -> Order:
    """1F1B over the passes of a rank: each group of microbatches through one chunk after the other."""
    passes = [  # in the order of the forwards; backwards take the chunks from the last one
        (chunk, microbatch)
        for first in range(0, m, group)
        for chunk in range(v)
        for microbatch in range(first, min(m, first + group))
    ]
    forwards = [Action(FORWARD, chunk * p + rank, k) for chunk, k in passes]
    backwards = [Action(BACKWARD, (v - 1 - chunk) * p + rank, k) for chunk, k in passes]
    return one_by_one(forwards, backwards, warm_up=min(m * v, 2 * (p - 1 - rank) + (v - 1) * group))


INTERLEAVED = ScheduleInfo(
    "interleaved",
    lambda r: interleaved(r.p, r.m, r.v, r.group),
    chunks=2,
    any_chunks=True,
    group=lambda p, m: next(iter(legal_groups(p, m)), p),
    least=1,
    also="p <= N <= m, and m % N is 0 or >= p",
    options=("group",),
    bubble="(p-1)(F+B)/v",
    live=lambda p, m, v: p + (p - 1) / v,
    planned=(2, 4, 8),
)
