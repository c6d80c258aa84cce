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

All ranks use one clock. Processes of one machine share theirs. The first rank of each other machine asks rank 0 for the
time, again and again. The fastest answer was the least disturbed: rank 0's clock showed it half-way through the round
trip, give or take half of it.
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
# The traffic counter with a clock: when each collective and send started, and which of them the rank waited for.
#
# Like the counter it sits in the dispatcher. The call that starts a collective passes there; the wait for it does not,
# because torch returns a `Work` for that. So the timer replaces the `Work` by its own, which times `wait`. An operator
# waits for functional collectives, and that operator does pass.
#
# The timer cannot see two things, and both count as compute: a collective of NCCL that ends before anybody waits for
# it, and the waits for a batch of NCCL calls (the ring of cp).


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
                self.record_wait(flight, start)
            return result
        known, start = len(self.events), self.now()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.events) > known:
            event = self.events[-1]
            flight = _Open(event.axis, event.kind, event.payload, start, self.during)
            self.flights.append(flight)
        elif name in _UNCOUNTED and len(ranks := ranks_of(named_args(func, args, kwargs))) > 1:
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

    def record_wait(self, flight: "_Open", start: float) -> None:
        """Record a wait for a flight, which began at `start` and is over."""
        end = self.now()
        self.waits.append(Wait(flight.axis, flight.what, start, end, self.during))
        flight.land(end)

    def landed(self, end: float) -> list[Flight]:
        """All flights; those that nobody has waited for yet end at `end`."""
        return [
            Flight(sent.axis, sent.what, sent.payload, sent.start, max(sent.start, sent.land(end)), sent.during)
            for sent in self.flights
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
        self.timer.record_wait(self.flight, start)
        return done

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def get_future(self) -> Any:
        return self.work.get_future()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---- tracer ---------------------------------------------------------------------------------------------------------


_ROUNDS = 20  # of questions for the time


class Silent:
    """A tracer of no steps: it keeps nothing and costs nothing."""

    watch = part = None

    def step(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def after(self, number: int, schedule: Schedule) -> Trace | None:
        return None


def tracer_of(mesh: Mesh, after: int, steps: int) -> "Tracer | Silent":
    """Of `steps` steps, which are counted from 1, behind the first `after`."""
    return Tracer(mesh, range(after + 1, after + steps + 1)) if steps else Silent()


class Tracer:
    def __init__(self, mesh: Mesh, steps: range, clock: Callable[[], float] = time.perf_counter):
        """`steps`: the numbers of those to trace. All ranks make theirs together: they compare clocks."""
        self.mesh, self.traced, self.clock = mesh, steps, clock
        self.offset, self.clock_error = against_rank_0(mesh, clock)
        self.timer = Timer(mesh, self.now)
        self.on = False
        self.windows: list[StepWindow] = []
        self.actions: list[BusySpan] = []
        self.updates: list[Update] = []
        self.parts: list[Update] = []
        self.others: list[float] = []  # seconds of steps that were not traced

    def now(self) -> float:
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self.clock()

    # ---- recording ------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self.on = number in self.traced
        now = self.now if self.on else self.clock  # a step that is not traced does not wait for the device
        start = now()
        with self.timer if self.on else nullcontext(), self._range(f"step {number}"):
            yield
        end = now()
        if self.on:
            self.windows.append(StepWindow(number, start, end))
        else:
            self.others.append(end - start)
        self.on = False

    def watch(self, action: Action) -> AbstractContextManager[None]:
        """Around an action of the pipeline."""
        return self._watched(action) if self.on else nullcontext()

    @contextmanager
    def _watched(self, action: Action) -> Iterator[None]:
        self.timer.during = action
        before, start = len(self.timer.waits), self.now()
        with self._range(str(action)):
            yield
        self.timer.during = None
        if action.kind in COMPUTE:
            came = [wait.end for wait in self.timer.waits[before:] if wait.message and wait.what == "receive"]
            self.actions.append(BusySpan(action, max(start, *came) if came else start, self.now()))

    @contextmanager
    def update(self, name: str) -> Iterator[None]:
        """Around a part of the optimizer's work."""
        if not self.on:
            yield
            return
        start = self.now()
        with self._range(name):
            yield
        self.updates.append(Update(name, start, self.now()))

    def part(self, name: str) -> AbstractContextManager[None]:
        """Around a part of an action: tokens on their way to experts or back."""
        return self._part(name) if self.on else nullcontext()

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        start = self.now()
        with self._range(name):
            yield
        self.parts.append(Update(name, start, self.now()))

    def _range(self, name: str) -> AbstractContextManager[None]:
        return _range(name) if self.on and self.mesh.device.type == "cuda" else nullcontext()

    # ---- the result -----------------------------------------------------------------------------------------------

    def after(self, number: int, schedule: Schedule) -> Trace | None:
        """After the last traced step rank 0 gets the records of all ranks. Collective."""
        if number != self.traced[-1]:
            return None
        world, layout = self.mesh.world, self.mesh.layout
        gathered = [self._records()]
        if world.size > 1:
            gathered = gather_values(gathered[0], RankTrace, world.group)
        return Trace(schedule, tuple(gathered), str(layout)) if world.rank == 0 else None

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
            flights=tuple(self.timer.landed(end)),
            untraced=median(self.others) if self.others else None,
            clock_error=self.clock_error,
        ).on_clock(self.offset)


@contextmanager
def _range(name: str) -> Iterator[None]:
    """It may end in another thread than it began: autograd's, in the second half of a pair."""
    number = torch.cuda.nvtx.range_start(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_end(number)


def against_rank_0(
    mesh: Mesh, clock: Callable[[], float] = time.perf_counter, host: str | None = None
) -> tuple[float, float]:
    """The offset to add to this rank's clock, and its possible error in seconds. Collective."""
    world = mesh.world
    if world.size == 1:
        return 0.0, 0.0
    hosts = all_gather_values(host or socket.gethostname(), str, world.group)
    firsts = {name: hosts.index(name) for name in hosts}
    local, measured = (0.0, 0.0), [(0.0, 0.0)] * world.size
    ping = torch.zeros(1, dtype=torch.float64, device="cpu" if world.staged else mesh.device)
    for first in firsts.values():
        if world.rank == 0 and first:
            for _ in range(_ROUNDS):
                dist.recv(ping, group=world.group, group_src=first)
                ping.item()  # on a GPU the message has come only now
                dist.send(torch.full_like(ping, clock()), group=world.group, group_dst=first)
        elif world.rank == first and first:
            answers = []
            for _ in range(_ROUNDS):
                start = clock()
                dist.send(ping, group=world.group, group_dst=0)
                dist.recv(ping, group=world.group, group_src=0)
                theirs, end = ping.item(), clock()
                answers.append(((end - start) / 2, theirs - (start + end) / 2))
            error, offset = min(answers)
            local = offset, error
    if len(firsts) > 1:
        measured = all_gather_values(local, tuple[float, float], world.group)
    return measured[firsts[hosts[world.rank]]]
