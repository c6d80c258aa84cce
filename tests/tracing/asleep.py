"""Stages that sleep, or multiply matrices, for a known time, run by the real pipeline over real ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.layout.layout import Layout
from fivefold.layout.stages import Stage
from fivefold.model.layers import TokenPositions
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Channels, Microbatch, Pipeline
from fivefold.parallel.wgrad import WeightGradQueue
from fivefold.schedules.registry import build
from fivefold.tracing.records import Trace
from fivefold.tracing.tracer import Tracer

HIDDEN = 4
SIDE = 224  # of those matrices


@dataclass(frozen=True)
class Naps:
    """Seconds of F, I and W of any stage; B takes I + W."""

    f: float
    i: float
    w: float
    working: bool = False  # a millisecond stands for a product of matrices, which takes about as long

    def take(self, seconds: float) -> None:
        if not self.working:
            time.sleep(seconds)
            return
        x = torch.full((SIDE, SIDE), 1.0 / SIDE)
        for _ in range(round(1000 * seconds)):
            x = x @ x


class Asleep(nn.Module):
    """A stage that hands on what it gets, in its own good time."""

    def __init__(self, stage: Stage, naps: Naps, later: WeightGradQueue):
        super().__init__()
        self.stage, self.naps, self.later = stage, naps, later
        self.spec = SimpleNamespace(hidden=HIDDEN)
        self.ops = SimpleNamespace(residual_positions=lambda place: place)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, place: TokenPositions, aim: Any = None) -> Tensor:
        if self.stage.first:
            x = torch.zeros(*x.shape, HIDDEN)
        return _Nap.apply(x, self.weight, self.naps, self.later)


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, naps: Naps, later: WeightGradQueue) -> Tensor:
        ctx.naps, ctx.later = naps, later
        naps.take(naps.f)
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.naps.take(ctx.naps.i)
        if ctx.later.tasks is None:
            ctx.naps.take(ctx.naps.w)
        else:
            ctx.later.tasks.append(lambda: ctx.naps.take(ctx.naps.w))
        return gradient, None, None, None


class NoWeights:
    always_split = False

    @contextmanager
    def microbatch(self, *, last: bool, stage: int = 0, part: str = "all") -> Iterator[None]:
        yield


def sleep(rank: int, world: int, text: str, naps: Naps, steps: int) -> Trace | None:
    """The trace of `steps` runs of a schedule, on rank 0."""
    layout = Layout.parse(text)
    mesh = Mesh.of(layout, torch.device("cpu"))
    schedule = build(layout.schedule, layout.pp, layout.microbatches, chunks=layout.chunks)
    later, last = WeightGradQueue(), layout.stages - 1
    stages = {
        number: Asleep(Stage(number, range(0), first=number == 0, last=number == last), naps, later)
        for number in schedule.placement.of_rank[mesh.pp.rank]
    }
    tracer = Tracer(mesh, range(1, steps + 1))
    channels = Channels(schedule, mesh, torch.float32)
    pipeline: Any = Pipeline(schedule, mesh.pp.rank, stages, NoWeights(), later, channels, tracer.watch)  # type: ignore[arg-type]
    tokens = torch.zeros(1, 2, dtype=torch.long)
    microbatch = Microbatch(tokens, TokenPositions(tokens, tokens[:, 0], 2))
    trace = None
    for step in range(1, steps + 1):
        torch.distributed.barrier()
        with tracer.step(step):
            pipeline.run([microbatch] * layout.microbatches, lambda y: y.sum())
        trace = tracer.gather(step, schedule)
    return trace
