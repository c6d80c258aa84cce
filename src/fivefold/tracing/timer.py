"""The traffic counter with a clock: times when each collective and send starts, and how long the rank waits for it.

Like the counter it is a dispatch mode. It sees the call that starts a collective, but not the wait for it, for which
torch returns a `Work`. So the timer replaces the `Work` by its own, which times `wait`. The wait for a functional
collective is an operator, which the timer does see.

The timer cannot see two things, which count as compute: the end of an NCCL collective before anybody waits for it,
and the waits for a batch of NCCL calls (the ring of cp).
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic_counter import SPACES, TrafficCounter, name_of, named_args, ranks_of
from fivefold.schedules.actions import Action
from fivefold.tracing.records import Flight, Wait

# Calls that the traffic counter leaves out, since they send nothing, but for which a rank waits.
_UNCOUNTED = {"recv": "receive", "irecv": "receive", "barrier": "barrier", "monitoredbarrier": "barrier"}


class Timer(TrafficCounter):
    """Counts and times communication. `now` returns the time, after all work of the rank so far is done."""

    def __init__(self, mesh: Mesh, now: Callable[[], float]):
        super().__init__(mesh)
        self.now = now
        self.on_host = mesh.device.type == "cpu"
        self.during: Action | None = None  # the action that the rank is in
        self.waits: list[Wait] = []
        self.flights: list[_OpenFlight] = []
        self.functional_flights: dict[int, _OpenFlight] = {}  # by address of the functional collective's result
        self.latest_work: object = None  # see `_with_timed_work`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in SPACES:
            return func(*args, **(kwargs or {}))
        name = name_of(func)
        if name == "waittensor":
            flight = self.functional_flights.pop(_address(args[0]), None)
            start = self.now()
            result = func(*args, **(kwargs or {}))
            if flight is not None:
                self.record_wait(flight, start)
            return result
        event_count, start = len(self.events), self.now()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.events) > event_count:
            event = self.events[-1]
            flight = _OpenFlight(event.axis, event.kind, event.payload, start, self.during)
            self.flights.append(flight)
        elif name in _UNCOUNTED and len(ranks := ranks_of(named_args(func, args, kwargs))) > 1:
            flight = _OpenFlight(self.axis(ranks), _UNCOUNTED[name], 0, start, self.during)
        else:
            return result
        if func.namespace == "c10d":
            return self._with_timed_work(result, flight)
        for tensor in result if isinstance(result, list | tuple) else (result,):
            self.functional_flights[_address(tensor)] = flight
        return result

    def _with_timed_work(self, result: Any, flight: "_OpenFlight") -> Any:
        """The result with a timed `Work`; it is a `Work`, or a tuple of tensors and a `Work`."""
        if isinstance(result, tuple):
            return tuple(self._with_timed_work(part, flight) for part in result)
        if not isinstance(result, torch.ScriptObject):
            return result
        work = _TimedWork(dist.Work.unbox(result), flight, self)
        self.latest_work = (
            work  # kept alive until the caller has it: with C++ references alone it loses its Python class
        )
        return work.boxed()

    def record_wait(self, flight: "_OpenFlight", start: float) -> None:
        """Records a wait for a flight, which began at `start` and ends now."""
        end = self.now()
        self.waits.append(Wait(flight.axis, flight.what, start, end, self.during))
        flight.set_end(end)

    def ended_flights(self, end: float) -> list[Flight]:
        """All flights; those for which the rank has not waited yet end at `end`."""
        return [
            Flight(sent.axis, sent.what, sent.payload, sent.start, max(sent.start, sent.set_end(end)), sent.during)
            for sent in self.flights
        ]


class _OpenFlight:
    """A collective or message that may not have ended yet. Of several ends that are set the first one counts."""

    def __init__(self, axis: str, what: Any, payload: int, start: float, during: Action | None):
        self.axis, self.what, self.payload, self.start, self.during = axis, what, payload, start, during
        self.end: float | None = None

    def set_end(self, end: float) -> float:
        """Sets the end, unless it is known already; returns the end that counts."""
        if self.end is None:
            self.end = end
        return self.end


class _TimedWork(dist.Work):
    def __init__(self, work: dist.Work, flight: _OpenFlight, timer: Timer):
        super().__init__()
        self.work, self.flight, self.timer = work, flight, timer
        if timer.on_host:
            with suppress(RuntimeError):  # gloo reports the end of some collectives, and of no message
                work.get_future().add_done_callback(self._set_end)

    def _set_end(self, _: Any) -> None:
        self.flight.set_end(self.timer.now())

    def wait(self, *timeout: Any) -> bool:
        start = self.timer.now()
        done = self.work.wait(*timeout)
        self.timer.record_wait(self.flight, start)
        return done

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def get_future(self) -> Any:
        return self.work.get_future()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
