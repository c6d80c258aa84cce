"""The traffic counter with a clock: when each collective and send started, and what the rank stood still for.

It stands where the counter stands, in the dispatcher. There the call passes that starts a collective, and not the wait
for it: torch hands out a `Work` for that. So the timer puts one of its own in its place, which times its `wait`.
Functional collectives are waited for by an operator, which does pass.

What it cannot see: when a collective of NCCL is over before anybody waits for it, and the waits for what NCCL has been
given in one batch (the ring of cp). They count as compute.
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
    """`now` gives the time at which all that the rank has computed so far was done."""

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
        return self._with_our_work(result, flight) if func.namespace == "c10d" else self._noted(result, flight)

    def _with_our_work(self, result: Any, flight: "_Open") -> Any:
        """A `Work`, or a pair of tensors and a `Work`."""
        if isinstance(result, tuple):
            return tuple(self._with_our_work(part, flight) for part in result)
        if not isinstance(result, torch.ScriptObject):
            return result
        work = _TimedWork(dist.Work.unbox(result), flight, self)
        self.latest = work  # until its caller has it: what lives in C++ alone forgets that it is ours
        return work.boxed()

    def _noted(self, result: Any, flight: "_Open") -> Any:
        """The tensor of a functional collective, or several."""
        for tensor in result if isinstance(result, list | tuple) else (result,):
            self.flying[_memory(tensor)] = flight
        return result

    def stood(self, flight: "_Open", start: float) -> None:
        """The rank has waited for a flight since `start`, and it is over."""
        end = self.now()
        self.waits.append(Wait(flight.axis, flight.what, start, end, self.during))
        flight.land(end)

    def landed(self, end: float) -> list[Flight]:
        """All flights; those that nobody has waited for yet end at `end`."""
        return [flight.as_flight(end) for flight in self.flights]


class _Open:
    """A flight that may not be over yet."""

    def __init__(self, axis: str, what: str, payload: int, start: float, during: Action | None):
        self.axis, self.what, self.payload, self.start, self.during = axis, what, payload, start, during
        self.end: float | None = None

    def land(self, end: float) -> None:
        if self.end is None:
            self.end = end

    def as_flight(self, end: float) -> Flight:
        over = end if self.end is None else self.end
        return Flight(self.axis, self.what, self.payload, self.start, max(self.start, over), self.during)  # type: ignore[arg-type]


class _TimedWork(dist.Work):
    def __init__(self, work: dist.Work, flight: _Open, timer: Timer):
        super().__init__()
        self.work, self.flight, self.timer = work, flight, timer
        if timer.on_host:
            with suppress(RuntimeError):  # gloo tells of the end of some collectives, and of no message's
                work.get_future().add_done_callback(lambda _: flight.land(timer.now()))

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
