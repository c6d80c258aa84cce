"""One rank of a run that is traced, and nothing else of it."""

from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.launch.device import choose_device, make_repeatable
from fivefold.launch.ranks import Rank
from fivefold.parallel.mesh import Mesh, backend
from fivefold.trace.records import Trace
from fivefold.train.loop import Trainer


def run(rank: Rank, job: Job) -> Trace | None:
    """The trace of all ranks, on rank 0."""
    device = choose_device(job.train.device, rank.number)
    make_repeatable(job.train)
    if rank.world > 1:
        rank.join(backend(device, rank.world))
    kept: list[Trace] = []
    Trainer(job, preflight(job, rank.world), Mesh.of(job.layout, device)).run([], kept.append)
    return kept[0] if kept else None
