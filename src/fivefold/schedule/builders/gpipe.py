"""GPipe: all forwards, then all backwards."""

from fivefold.schedule.actions import BACKWARD, FORWARD, Action
from fivefold.schedule.record import Record
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import wire


def gpipe(p: int, m: int) -> Schedule:
    """The bubble is (p - 1)(F + B), a share of (p - 1)/(m + p - 1); every rank holds all m activations."""
    orders = [
        [Action(kind, rank, microbatch) for kind in (FORWARD, BACKWARD) for microbatch in range(m)] for rank in range(p)
    ]
    return wire("gpipe", Placement.single(p), m, orders, promise=Promise((m,) * p, slots=3 * (m + p - 1)))


GPIPE = Record("gpipe", lambda r: gpipe(r.p, r.m), bubble="(p-1)(F+B)", live=lambda p, m, v: m)
