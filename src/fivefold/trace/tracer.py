"""The tracer of one rank: told of every step and action, it keeps their times, and has the timer keep the rest.

    tracer = tracer_of(mesh, after=3, steps=2)
    engine = Engine(job, mesh, tracer.watch)
    with tracer.step(number):
        engine.accumulate(batch)
        with tracer.update("norm"):
            ...
    trace = tracer.after(number, engine.schedule)

On CUDA, where calls return before their work is done, the rank waits for its own stream at the start and the end of all
that is timed. That takes launches out of each other's shadow: a traced step is slower than others. Each span is an NVTX
range too, which `nsys` shows.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median

import torch
import torch.distributed as dist

from fivefold.parallel.mesh import Mesh
from fivefold.schedule.actions import COMPUTE, Action
from fivefold.schedule.clock import Span
from fivefold.schedule.schedule import Schedule
from fivefold.trace.clocks import against_rank_0
from fivefold.trace.records import RankTrace, Trace, Update, Window
from fivefold.trace.timer import Timer


class Silent:
    """A tracer of no steps: it keeps nothing and costs nothing."""

    watch = None

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
        self.windows: list[Window] = []
        self.actions: list[Span] = []
        self.updates: list[Update] = []
        self.others: list[float] = []  # seconds of steps that were not traced

    def now(self) -> float:
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self.clock()

    # ---- what is told ----------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self.on = number in self.traced
        start = self.now()
        with self.timer if self.on else nullcontext(), self._range(f"step {number}"):
            yield
        end = self.now()
        if self.on:
            self.windows.append(Window(number, start, end))
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
            self.actions.append(Span(action, max(start, *came) if came else start, self.now()))

    @contextmanager
    def update(self, name: str) -> Iterator[None]:
        """Around a part of the optimizer's work."""
        start = self.now()
        with self._range(name):
            yield
        if self.on:
            self.updates.append(Update(name, start, self.now()))

    def _range(self, name: str) -> AbstractContextManager[None]:
        return torch.cuda.nvtx.range(name) if self.on and self.mesh.device.type == "cuda" else nullcontext()

    # ---- what comes of it ------------------------------------------------------------------------------------------

    def after(self, number: int, schedule: Schedule) -> Trace | None:
        """When the last of the steps is over, all ranks' results together: rank 0 gets them. Every rank must ask."""
        if number != self.traced[-1]:
            return None
        world, mine = self.mesh.world, self.result()
        if world.size == 1:
            return Trace(schedule, (mine,), str(self.mesh.layout))
        gathered: list[RankTrace | None] | None = [None] * world.size if world.rank == 0 else None
        dist.gather_object(mine, gathered, group=world.group, group_dst=0)
        if gathered is None:
            return None
        return Trace(schedule, tuple(filter(None, gathered)), str(self.mesh.layout))

    def result(self) -> RankTrace:
        """What this rank has seen."""
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
            waits=tuple(self.timer.waits),
            flights=tuple(self.timer.landed(end)),
            untraced=median(self.others) if self.others else None,
            clock_error=self.clock_error,
        ).on_clock(self.offset)
