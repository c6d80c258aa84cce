"""The dry run of one rank's step: counts the memory, FLOPs and traffic of every operator."""

import time
from dataclasses import dataclass

import numpy as np

from fivefold.cost.collective_time import Traffic
from fivefold.data.batch import Batch
from fivefold.dry.fake import Kernels, StatedRouting, pretending
from fivefold.job.config import Job
from fivefold.parallel.traffic_counter import TrafficCounter
from fivefold.schedules.schedule import peak_live
from fivefold.trainer.engine import Engine
from fivefold.trainer.ledger import Ledger, LedgerSpan


@dataclass(frozen=True)
class RankRun:
    """The memory, traffic and FLOPs of one rank in a step."""

    rank: int
    place: dict[str, int]  # its coordinates, by axis
    layers: tuple[int, ...]  # how many layers each of its stages has
    parameters: int  # bytes between steps
    gradients: int  # bytes, at most
    optimizer: int  # bytes; so is the next one
    peak: int
    peak_moment: str
    moments: tuple[LedgerSpan, ...]
    live: int  # the most (stage, microbatch) pairs in flight at a time
    allowed: int  # the same by the schedule
    flops: float
    traffic: tuple[Traffic, ...]
    seconds: float  # the time of the dry run itself

    @property
    def activations(self) -> int:
        """Bytes at the peak that are not state."""
        peak = max(self.moments, key=lambda moment: moment.peak)
        return peak.peak - peak.parameters - peak.gradients_at_peak - peak.optimizer


def dry_run_rank(job: Job, rank: int, kernels: Kernels = "cuda", imbalance: float = 1.0) -> RankRun:
    """Runs a step of `rank` of the job's world.

    `imbalance`: the tokens that its experts get, over the mean of its ep group.
    """
    start = time.perf_counter()
    with pretending(job, rank, kernels) as mesh:
        ledger: Ledger | None = None
        engine = Engine(job, mesh, lambda action: ledger.moment(action))  # type: ignore[union-attr]
        if job.model.experts is not None:
            engine.ops.dispatch.host = StatedRouting(mesh.ep.rank, mesh.ep.size, imbalance)
        counter = TrafficCounter(mesh)
        ledger = Ledger(engine, counter)
        resident = engine.weights.resident()  # between steps
        with ledger:
            engine.forward_backward(empty_batch(job))
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
            parameters=resident["parameters"],
            gradients=max(moment.gradients for moment in ledger.moments),
            optimizer=resident["masters"] + engine.optimizer.resident(),
            peak=ledger.peak,
            peak_moment=ledger.peak_moment,
            moments=tuple(ledger.moments),
            live=engine.pipeline.peak,
            allowed=peak_live(engine.schedule.compute(mesh.pp.rank)),
            flops=ledger.flops,
            traffic=tuple(counter.rows()),
            seconds=time.perf_counter() - start,
        )


def empty_batch(job: Job) -> Batch:
    """A global batch of the job's shape, all zeros: fake tensors have no values."""
    shape = (job.train.batch, job.data.seq)
    tokens, targets = np.zeros((2, *shape), np.int64)
    return Batch(np.arange(job.train.batch), tokens, targets, np.ones(shape, bool), np.zeros(shape, np.int32))
