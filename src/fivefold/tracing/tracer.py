"""The tracer of one rank: it records the times of steps and actions, and its timer records those of communication.

    tracer = make_tracer(mesh, after=3, steps=2)
    engine = Engine(job, mesh, tracer.watch)
    with tracer.step(number):
        engine.forward_backward(batch)
        with tracer.update("norm"):
            ...
    trace = tracer.gather(number, engine.schedule)

On CUDA calls return before their work is done, so the rank synchronizes its stream at the start and the end of every
span. Launches then no longer overlap: a traced step is slower than others. Each span is an NVTX range too, for `nsys`.

All times are by rank 0's clock (`clock_offset.py`). `timer.py` records the times of communication.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median

import torch

from fivefold.parallel.control import gather_values
from fivefold.parallel.mesh import Mesh
from fivefold.schedules.actions import COMPUTE_KINDS, Action
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.schedule import Schedule
from fivefold.tracing.clock_offset import clock_offset
from fivefold.tracing.records import NamedSpan, RankTrace, StepWindow, Trace
from fivefold.tracing.timer import Timer


def make_tracer(mesh: Mesh, after: int, steps: int) -> "Tracer | NoTracer":
    """A tracer of the `steps` steps after the first `after` ones."""
    return Tracer(mesh, range(after + 1, after + steps + 1)) if steps else NoTracer()


class Tracer:
    """Records the steps of one rank that have a number, from 1, in `steps`. Made by all ranks: they compare clocks."""

    def __init__(self, mesh: Mesh, steps: range, clock: Callable[[], float] = time.perf_counter):
        self.mesh, self.steps, self.clock = mesh, steps, clock
        self.offset, self.clock_error = clock_offset(mesh, clock)
        self.timer = Timer(mesh, self.now)
        self.tracing = False  # whether the current step is traced
        self.windows: list[StepWindow] = []
        self.actions: list[BusySpan] = []
        self.updates: list[NamedSpan] = []
        self.action_parts: list[NamedSpan] = []
        self.untraced: list[float] = []  # seconds of steps that were not traced

    def now(self) -> float:
        """The time, after all work on the device so far is done."""
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self.clock()

    # ---- recording ------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self.tracing = number in self.steps
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
        if action.kind in COMPUTE_KINDS:
            waits = self.timer.waits[wait_count:]
            received = [wait.end for wait in waits if wait.is_message and wait.what == "receive"]
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
        self.updates.append(NamedSpan(name, start, self.now()))

    def part(self, name: str) -> AbstractContextManager[None]:
        """Traces a part of an action: the dispatch of tokens to experts, or the combine."""
        return self._part(name) if self.tracing else nullcontext()

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        start = self.now()
        with self._range(name):
            yield
        self.action_parts.append(NamedSpan(name, start, self.now()))

    def _range(self, name: str) -> AbstractContextManager[None]:
        return _nvtx_range(name) if self.tracing and self.mesh.device.type == "cuda" else nullcontext()

    # ---- result ---------------------------------------------------------------------------------------------------

    def gather(self, number: int, schedule: Schedule) -> Trace | None:
        """The trace of all ranks, on rank 0 after the last traced step; else None. Collective after that step."""
        if number != self.steps[-1]:
            return None
        world, layout = self.mesh.world, self.mesh.layout
        ranks = [self._rank_trace()]
        if world.size > 1:
            ranks = gather_values(ranks[0], RankTrace, world.group)
        return Trace(schedule, tuple(ranks), str(layout)) if world.rank == 0 else None

    def _rank_trace(self) -> RankTrace:
        mesh, end = self.mesh, max((window.end for window in self.windows), default=0.0)
        layout, rank = mesh.layout, mesh.world.rank
        return RankTrace(
            rank=rank,
            name=layout.place(rank).replace(" ", "").replace(",", " "),
            pipeline=layout.pipeline(rank),
            pp_rank=mesh.pp.rank,
            steps=tuple(self.windows),
            actions=tuple(self.actions),
            updates=tuple(self.updates),
            action_parts=tuple(self.action_parts),
            waits=tuple(self.timer.waits),
            flights=tuple(self.timer.ended_flights(end)),
            untraced=median(self.untraced) if self.untraced else None,
            clock_error=self.clock_error,
        ).on_clock(self.offset)


class NoTracer:
    """A tracer that traces no step."""

    watch = part = None  # no hook: the engine calls none

    def step(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, number: int, schedule: Schedule) -> Trace | None:
        return None


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    """An NVTX range, which may end in another thread than it began: autograd's, in the second half of a pair."""
    number = torch.cuda.nvtx.range_start(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_end(number)
