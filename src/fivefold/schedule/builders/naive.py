"""Naive model parallelism: one microbatch at a time, so that one rank works and the others wait. The baseline."""

from fivefold.schedule.actions import BACKWARD, FORWARD, Action
from fivefold.schedule.record import Record
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import wire


def naive(p: int, m: int) -> Schedule:
    """Every rank idles (p - 1)/p of the time, and holds one activation."""
    orders = [
        [Action(kind, rank, microbatch) for microbatch in range(m) for kind in (FORWARD, BACKWARD)] for rank in range(p)
    ]
    return wire("naive", Placement.single(p), m, orders, promise=Promise((1,) * p, slots=3 * m * p))


NAIVE = Record(
    "naive",
    lambda r: naive(r.p, r.m),
    bubble="(p-1)/p of the time",
    refills=True,
    live=lambda p, m, v: 1,
)
