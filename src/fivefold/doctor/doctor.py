"""`fivefold doctor`: every rank of a job measures its device, its links and its node, and the odd one is named."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fivefold.doctor.examination import Examination
from fivefold.doctor.result import DoctorResult
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job, read_job
from fivefold.job.preflight import run_directory_problems
from fivefold.launch import ranks
from fivefold.launch.world import World
from fivefold.support.documents import path_of
from fivefold.support.errors import UserError

_LONGEST = 300.0  # seconds for ranks of this machine


def doctor(
    job: str | Path | Job | None = None, changes: Sequence[str] = (), *, nproc: int | None = None
) -> DoctorResult:
    """Examine this machine with `nproc` ranks of a job (default: as many as its layout has).

    Every rank measures matmuls in the job's dtype and collectives along each axis of its layout; the node's disk,
    limits, clock and versions are looked at, too. No data is read, and nothing is trained.
    """
    resolved = job if isinstance(job, Job) else read_job(job and str(job), list(changes))
    if isinstance(job, Job) and changes:
        raise UserError(f"{changes[0]!r} changes a job that is given by name; change the object instead")
    size = resolved.layout.world if nproc is None else nproc
    check(resolved, size)
    start = time.monotonic()
    reports = ranks.run(size, "fivefold.doctor.examine:here", msgspec.to_builtins(resolved), timeout=_LONGEST)
    return DoctorResult(Examination(resolved, reports), time.monotonic() - start)


def join(job: Job, world: World) -> DoctorResult | None:
    """Examine the machines of the ranks that another launcher has started, as one of them; rank 0 has the result."""
    check(job, world.size)
    from fivefold.doctor.examine import joined

    start = time.monotonic()
    reports = joined(job, world)
    return DoctorResult(Examination(job, reports), time.monotonic() - start) if reports else None


def check(job: Job, world: int) -> None:
    """What is wrong with the job on so many ranks. Data that is not there yet is no problem."""
    problems = job.problems(world)
    try:
        problems += run_directory_problems(path_of(job.run.dir))
        if job.run.cluster:
            Cluster.read(job.run.cluster)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(problems)
