"""The tracer of one rank: it records the times of steps and actions, and its timer records those of communication.

    tracer = tracer_of(mesh, after=3, steps=2)
    engine = Engine(job, mesh, tracer.watch)
    with tracer.step(number):
        engine.forward_backward(batch)
        with tracer.update("norm"):
            ...
    trace = tracer.after(number, engine.schedule)

On CUDA calls return before their work is done, so the rank synchronizes its stream at the start and the end of every
span. Launches then no longer overlap: a traced step is slower than others. Each span is an NVTX range too, for `nsys`.

All times are by rank 0's clock. Processes of one machine share a clock. The first rank of each other machine asks rank
0 for the time several times, and uses the answer with the shortest round trip: rank 0's clock showed it half-way
through that, with an error of at most half of it.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.control import all_gather_values, gather_values
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic import SPACES, TrafficCounter, name_of, named_args, ranks_of
from fivefold.schedules.actions import COMPUTE, Action
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.schedule import Schedule
from fivefold.tracing.records import Flight, RankTrace, StepWindow, Trace, Update, Wait

# ---- timer ----------------------------------------------------------------------------------------------------------
# The traffic counter with a clock: times when each collective and send starts, and how long the rank waits for it.
#
# Like the counter it is a dispatch mode. It sees the call that starts a collective, but not the wait for it, for which
# torch returns a `Work`. So the timer replaces the `Work` by its own, which times `wait`. The wait for a functional
# collective is an operator, which the timer does see.
#
# The timer cannot see two things, which count as compute: the end of an NCCL collective before anybody waits for it,
# and the waits for a batch of NCCL calls (the ring of cp).


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
        self.functional: dict[int, _OpenFlight] = {}  # of functional collectives, by address of the result
        self.latest_work: object = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in SPACES:
            return func(*args, **(kwargs or {}))
        name = name_of(func)
        if name == "waittensor":
            flight = self.functional.pop(_address(args[0]), None)
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
            self.functional[_address(tensor)] = flight
        return result

    def _with_timed_work(self, result: Any, flight: "_OpenFlight") -> Any:
        """The result with a timed `Work`; it is a `Work`, or a tuple of tensors and a `Work`."""
        if isinstance(result, tuple):
            return tuple(self._with_timed_work(part, flight) for part in result)
        if not isinstance(result, torch.ScriptObject):
            return result
        work = _TimedWork(dist.Work.unbox(result), flight, self)
        self.latest_work = work  # until the caller has it: an object with only C++ references loses its Python class
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
    """A flight that may not have ended yet."""

    def __init__(self, axis: str, what: Any, payload: int, start: float, during: Action | None):
        self.axis, self.what, self.payload, self.start, self.during = axis, what, payload, start, during
        self.end: float | None = None

    def set_end(self, end: float) -> float:
        """Sets the end, unless it is set already, and returns it."""
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


# ---- tracer ---------------------------------------------------------------------------------------------------------


_ROUNDS = 20  # of messages that compare two clocks


class NoTracer:
    """A tracer that traces no step."""

    watch = part = None

    def step(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def after(self, number: int, schedule: Schedule) -> Trace | None:
        return None


def tracer_of(mesh: Mesh, after: int, steps: int) -> "Tracer | NoTracer":
    """A tracer of the `steps` steps after the first `after` ones."""
    return Tracer(mesh, range(after + 1, after + steps + 1)) if steps else NoTracer()


class Tracer:
    def __init__(self, mesh: Mesh, steps: range, clock: Callable[[], float] = time.perf_counter):
        """`steps`: the numbers of the steps to trace, from 1. Collective: ranks compare their clocks."""
        self.mesh, self.traced, self.clock = mesh, steps, clock
        self.offset, self.clock_error = clock_offset(mesh, clock)
        self.timer = Timer(mesh, self.now)
        self.tracing = False  # in a step that is traced
        self.windows: list[StepWindow] = []
        self.actions: list[BusySpan] = []
        self.updates: list[Update] = []
        self.parts: list[Update] = []
        self.untraced: list[float] = []  # seconds of steps that were not traced

    def now(self) -> float:
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self.clock()

    # ---- recording ------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self.tracing = number in self.traced
        now = self.now if self.tracing else self.clock  # a step that is not traced does not wait for the device
        start = now()
        with self.timer if self.tracing else nullcontext(), self._range(f"step {number}"):
            yield
        end = now()
        if self.tracing:
            self.windows.append(StepWindow(number, start, end))
        else:
            self.untraced.append(end - start)
        self.tracing = False

    def watch(self, action: Action) -> AbstractContextManager[None]:
        """Traces an action of the pipeline."""
        return self._watched(action) if self.tracing else nullcontext()

    @contextmanager
    def _watched(self, action: Action) -> Iterator[None]:
        self.timer.during = action
        wait_count, start = len(self.timer.waits), self.now()
        with self._range(str(action)):
            yield
        self.timer.during = None
        if action.kind in COMPUTE:
            waits = self.timer.waits[wait_count:]
            received = [wait.end for wait in waits if wait.message and wait.what == "receive"]
            self.actions.append(BusySpan(action, max([start, *received]), self.now()))

    @contextmanager
    def update(self, name: str) -> Iterator[None]:
        """Traces a part of the optimizer's work."""
        if not self.tracing:
            yield
            return
        start = self.now()
        with self._range(name):
            yield
        self.updates.append(Update(name, start, self.now()))

    def part(self, name: str) -> AbstractContextManager[None]:
        """Traces a part of an action: the dispatch of tokens to experts, or the combine."""
        return self._part(name) if self.tracing else nullcontext()

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        start = self.now()
        with self._range(name):
            yield
        self.parts.append(Update(name, start, self.now()))

    def _range(self, name: str) -> AbstractContextManager[None]:
        return _range(name) if self.tracing and self.mesh.device.type == "cuda" else nullcontext()

    # ---- the result -----------------------------------------------------------------------------------------------

    def after(self, number: int, schedule: Schedule) -> Trace | None:
        """The trace of all ranks, on rank 0 after the last traced step; else None. Collective after that step."""
        if number != self.traced[-1]:
            return None
        world, layout = self.mesh.world, self.mesh.layout
        ranks = [self._records()]
        if world.size > 1:
            ranks = gather_values(ranks[0], RankTrace, world.group)
        return Trace(schedule, tuple(ranks), str(layout)) if world.rank == 0 else None

    def _records(self) -> RankTrace:
        mesh, end = self.mesh, max((window.end for window in self.windows), default=0.0)
        layout, rank = mesh.layout, mesh.world.rank
        return RankTrace(
            rank=rank,
            name=layout.place(rank).replace(" ", "").replace(",", " "),
            line=layout.pipeline(rank),
            place=mesh.pp.rank,
            steps=tuple(self.windows),
            actions=tuple(self.actions),
            updates=tuple(self.updates),
            parts=tuple(self.parts),
            waits=tuple(self.timer.waits),
            flights=tuple(self.timer.ended_flights(end)),
            untraced=median(self.untraced) if self.untraced else None,
            clock_error=self.clock_error,
        ).on_clock(self.offset)


@contextmanager
def _range(name: str) -> Iterator[None]:
    """An NVTX range, which may end in another thread than it began: autograd's, in the second half of a pair."""
    number = torch.cuda.nvtx.range_start(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_end(number)


def clock_offset(
    mesh: Mesh, clock: Callable[[], float] = time.perf_counter, host: str | None = None
) -> tuple[float, float]:
    """(the offset to add to this rank's clock, its error at most), in seconds. Collective."""
    world = mesh.world
    if world.size == 1:
        return 0.0, 0.0
    hosts = all_gather_values(host or socket.gethostname(), str, world.group)
    first_ranks = {name: hosts.index(name) for name in hosts}
    local, by_rank = (0.0, 0.0), [(0.0, 0.0)] * world.size
    ping = torch.zeros(1, dtype=torch.float64, device="cpu" if world.staged else mesh.device)
    for first in first_ranks.values():
        if world.rank == 0 and first:
            for _ in range(_ROUNDS):
                dist.recv(ping, group=world.group, group_src=first)
                ping.item()  # on a GPU, waits for the message
                dist.send(torch.full_like(ping, clock()), group=world.group, group_dst=first)
        elif world.rank == first and first:
            answers = []
            for _ in range(_ROUNDS):
                start = clock()
                dist.send(ping, group=world.group, group_dst=0)
                dist.recv(ping, group=world.group, group_src=0)
                rank_0_time, end = ping.item(), clock()
                answers.append(((end - start) / 2, rank_0_time - (start + end) / 2))
            error, offset = min(answers)
            local = offset, error
    if len(first_ranks) > 1:
        by_rank = all_gather_values(local, tuple[float, float], world.group)
    return by_rank[first_ranks[hosts[world.rank]]]
