"""Breadth-first (looped) pipelining: GPipe on v chunks per rank. All microbatches pass chunk 0, then all chunk 1."""

from fivefold.schedule.actions import BACKWARD, FORWARD, Action
from fivefold.schedule.record import Record
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import Order, wire


def breadth_first(p: int, m: int, v: int = 2) -> Schedule:
    """The bubble is (p - 1)(F + B)/v when m >= p; every rank holds all m activations of all its chunks.

    Its merit is that a chunk's weights are used in one go, so that ZeRO gathers and reduces each of them once.
    """
    orders = [_order(p, m, v, rank) for rank in range(p)]
    slots = 3 * ((v - 1) * max(m, p) + m + p - 1)  # with m < p a chunk waits for its first microbatch to come round
    return wire("bfs", Placement.looped(p, v), m, orders, promise=Promise((m * v,) * p, slots))


def _order(p: int, m: int, v: int, rank: int) -> Order:
    forwards = [Action(FORWARD, chunk * p + rank, k) for chunk in range(v) for k in range(m)]
    backwards = [Action(BACKWARD, chunk * p + rank, k) for chunk in reversed(range(v)) for k in range(m)]
    return forwards + backwards


BREADTH_FIRST = Record(
    "bfs",
    lambda r: breadth_first(r.p, r.m, r.chunks),
    chunks=2,
    any_chunks=True,
    bubble="(p-1)(F+B)/v",
    live=lambda p, m, v: m,
)
