"""One rank's step, dry: every module, collective and action of the schedule, counted."""

import time
from dataclasses import dataclass

import numpy as np

from fivefold.cost.collective_time import Traffic
from fivefold.data.batch import Batch
from fivefold.dry.fake import Kernels, StatedRouting, pretending
from fivefold.job.config import Job
from fivefold.parallel.traffic import TrafficCounter
from fivefold.schedules.schedule import peak_live
from fivefold.trainer.engine import Engine
from fivefold.trainer.ledger import Ledger, LedgerSpan


@dataclass(frozen=True)
class RankRun:
    """What one rank of a layout holds, sends and computes in a step."""

    rank: int
    place: dict[str, int]  # along the axes
    layers: tuple[int, ...]  # of its stages
    parameters: int  # bytes, like the next four; between steps
    gradients: int  # at their most
    optimizer: int
    peak: int
    peak_moment: str
    moments: tuple[LedgerSpan, ...]
    live: int  # the most (stage, microbatch) pairs that wait for their backward pass
    allowed: int  # the schedule's own count of them
    flops: float
    traffic: tuple[Traffic, ...]
    seconds: float  # that the dry run took

    @property
    def activations(self) -> int:
        """Bytes at the peak that are not state."""
        at = max(self.moments, key=lambda moment: moment.peak)
        return at.peak - at.parameters - at.gradients_at_peak - at.optimizer


def dry_run_rank(job: Job, rank: int, kernels: Kernels = "cuda", imbalance: float = 1.0) -> RankRun:
    """A step of `rank` of the job's world. `imbalance`: what it gets of the tokens of an ep group, over the mean."""
    begin = time.perf_counter()
    with pretending(job, rank, kernels) as mesh:
        ledger: Ledger | None = None
        engine = Engine(job, mesh, lambda action: ledger.moment(action))  # type: ignore[union-attr]
        if job.model.experts is not None:
            engine.ops.dispatch.host = StatedRouting(mesh.ep.rank, mesh.ep.size, imbalance)
        counter = TrafficCounter(mesh)
        ledger = Ledger(engine, counter)
        between = engine.weights.resident()
        with ledger:
            engine.forward_backward(blank(job))
            with ledger.moment("the sum of gradients"):
                norm = engine.gradient_norm()
            with ledger.moment("the optimizer"):
                engine.step(1e-3, norm)
            with ledger.moment("new weights"):
                engine.weights.wait_params()
        return RankRun(
            rank=rank,
            place=job.layout.coordinates(rank),
            layers=tuple(len(model.stage.layers) for model in engine.stages.values()),
            parameters=between["parameters"],
            gradients=max(moment.gradients for moment in ledger.moments),
            optimizer=between["masters"] + engine.optimizer.resident(),
            peak=ledger.peak,
            peak_moment=ledger.peak_moment,
            moments=tuple(ledger.moments),
            live=engine.pipeline.peak,
            allowed=peak_live(engine.schedule.compute(mesh.pp.rank)),
            flops=ledger.flops,
            traffic=tuple(counter.rows()),
            seconds=time.perf_counter() - begin,
        )


def blank(job: Job) -> Batch:
    """A global batch of the job's shape. Nobody reads its content."""
    shape = (job.train.batch, job.data.seq)
    tokens, targets = np.zeros((2, *shape), np.int64)
    return Batch(np.arange(job.train.batch), tokens, targets, np.ones(shape, bool), np.zeros(shape, np.int32))
