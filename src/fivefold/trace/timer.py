"""The traffic counter with a clock: when each collective and send started, and which of them the rank waited for.

Like the counter it sits in the dispatcher. The call that starts a collective passes there; the wait for it does not,
because torch returns a `Work` for that. So the timer replaces the `Work` by its own, which times `wait`. An operator
waits for functional collectives, and that operator does pass.

The timer cannot see two things, and both count as compute: a collective of NCCL that ends before anybody waits for it,
and the waits for a batch of NCCL calls (the ring of cp).
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic import SPACES, TrafficCounter, given_to, name_of, ranks_of
from fivefold.schedule.actions import Action
from fivefold.trace.records import Flight, Wait

_UNCOUNTED = {"recv": "receive", "irecv": "receive", "barrier": "barrier", "monitoredbarrier": "barrier"}


class Timer(TrafficCounter):
    """`now` gives the time at which the rank had finished all its work so far."""

    def __init__(self, mesh: Mesh, now: Callable[[], float]):
        super().__init__(mesh)
        self.now = now
        self.on_host = mesh.device.type == "cpu"
        self.during: Action | None = None  # the action that the rank is in
        self.waits: list[Wait] = []
        self.flights: list[_Open] = []
        self.flying: dict[int, _Open] = {}  # by the memory that a functional collective will fill
        self.latest: object = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in SPACES:
            return func(*args, **(kwargs or {}))
        name = name_of(func)
        if name == "waittensor":
            flight = self.flying.pop(_memory(args[0]), None)
            start = self.now()
            result = func(*args, **(kwargs or {}))
            if flight is not None:
                self.stood(flight, start)
            return result
        known, start = len(self.events), self.now()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.events) > known:
            event = self.events[-1]
            flight = _Open(event.axis, event.kind, event.payload, start, self.during)
            self.flights.append(flight)
        elif name in _UNCOUNTED and len(ranks := ranks_of(given_to(func, args, kwargs))) > 1:
            flight = _Open(self.axis(ranks), _UNCOUNTED[name], 0, start, self.during)
        else:
            return result
        if func.namespace == "c10d":
            return self._with_our_work(result, flight)
        for tensor in result if isinstance(result, list | tuple) else (result,):
            self.flying[_memory(tensor)] = flight
        return result

    def _with_our_work(self, result: Any, flight: "_Open") -> Any:
        """A `Work`, or a pair of tensors and a `Work`."""
        if isinstance(result, tuple):
            return tuple(self._with_our_work(part, flight) for part in result)
        if not isinstance(result, torch.ScriptObject):
            return result
        work = _TimedWork(dist.Work.unbox(result), flight, self)
        self.latest = work  # until its caller has it: an object that only C++ holds loses its Python class
        return work.boxed()

    def stood(self, flight: "_Open", start: float) -> None:
        """Record a wait for a flight, which began at `start` and is over."""
        end = self.now()
        self.waits.append(Wait(flight.axis, flight.what, start, end, self.during))
        flight.land(end)

    def landed(self, end: float) -> list[Flight]:
        """All flights; those that nobody has waited for yet end at `end`."""
        return [
            Flight(one.axis, one.what, one.payload, one.start, max(one.start, one.land(end)), one.during)
            for one in self.flights
        ]


class _Open:
    """A flight that may not be over yet."""

    def __init__(self, axis: str, what: Any, payload: int, start: float, during: Action | None):
        self.axis, self.what, self.payload, self.start, self.during = axis, what, payload, start, during
        self.end: float | None = None

    def land(self, end: float) -> float:
        """The first end that is reported counts."""
        self.end = end if self.end is None else self.end
        return self.end


class _TimedWork(dist.Work):
    def __init__(self, work: dist.Work, flight: _Open, timer: Timer):
        super().__init__()
        self.work, self.flight, self.timer = work, flight, timer
        if timer.on_host:
            with suppress(RuntimeError):  # gloo reports the end of some collectives, and of no message
                work.get_future().add_done_callback(self._over)

    def _over(self, _: Any) -> None:
        self.flight.land(self.timer.now())

    def wait(self, *timeout: Any) -> bool:
        start = self.timer.now()
        done = self.work.wait(*timeout)
        self.timer.stood(self.flight, start)
        return done

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def get_future(self) -> Any:
        return self.work.get_future()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
