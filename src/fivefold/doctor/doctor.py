"""`fivefold doctor`: every rank of a job measures its device, its links and its node, and the odd one is named."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fivefold.deploy.torchrun import HOST, PORT
from fivefold.doctor.examination import Examination
from fivefold.doctor.result import DoctorResult
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job, read_job
from fivefold.job.preflight import run_directory_problems
from fivefold.launch import ranks
from fivefold.launch.cores import cores
from fivefold.launch.world import World
from fivefold.support.documents import path_of
from fivefold.support.errors import UserError
from fivefold.support.formatting import counted

_LONGEST = 300.0  # seconds for ranks of this machine
_CROWD = 4  # ranks on a core: more were meant for other machines
_FEW = 8  # ranks that any machine may start


def doctor(
    job: str | Path | Job | None = None, changes: Sequence[str] = (), *, nproc: int | None = None
) -> DoctorResult:
    """Examine this machine with `nproc` ranks of a job (default: as many as its layout has).

        ff.doctor("examples/demo.toml").ok
        ff.doctor(None, ["layout=dp=2"], nproc=2)

    Every rank measures matmuls in the job's dtype and collectives along each axis of its layout; the node's disk,
    limits, clock and versions are looked at, too. No data is read, and nothing is trained.
    """
    resolved = job if isinstance(job, Job) else read_job(job and str(job), list(changes))
    if isinstance(job, Job) and changes:
        raise UserError(f"{changes[0]!r} changes a job that is given by name; change the object instead")
    return here(resolved, nproc, ["JOB"] if isinstance(job, Job) else [*([str(job)] if job else []), *changes])


def here(job: Job, nproc: int | None, words: Sequence[str]) -> DoctorResult:
    """Examine this machine; `words` are what a command names the job by."""
    size = job.layout.world if nproc is None else nproc
    check(job, size)
    if nproc is None and (sentence := _elsewhere(job, shlex.join(words))):
        raise UserError(sentence)
    start = time.monotonic()
    reports = ranks.run(size, "fivefold.doctor.examine:here", msgspec.to_builtins(job), timeout=_LONGEST)
    return DoctorResult(Examination(job, reports), time.monotonic() - start)


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


def _elsewhere(job: Job, words: str) -> str:
    """Why the ranks of a job are not all started on this machine, and how they are on theirs."""
    world, cluster = job.layout.world, Cluster.read(job.run.cluster) if job.run.cluster else None
    if cluster and cluster.nodes > 1 and world > max(group.gpus for group in cluster.groups):
        why = f"they are those of {cluster.nodes} nodes, run.cluster={job.run.cluster}"
    elif world > max(_FEW, _CROWD * cores()):
        why = f"this machine has {counted(cores(), 'core')}"
    else:
        return ""
    ways = [f"srun -n{world} fivefold doctor {words}"]
    if cluster and cluster.world == world and len({group.gpus for group in cluster.groups}) == 1:
        nodes, each = cluster.nodes, cluster.groups[0].gpus
        meeting = f" --rdzv-backend=c10d --rdzv-endpoint={HOST}:{PORT}" if nodes > 1 else ""
        ways = [
            f"srun -N{nodes} --ntasks-per-node={each} fivefold doctor {words}",
            f"on each node torchrun --nnodes={nodes} --nproc-per-node={each}{meeting} -m fivefold doctor {words}",
        ]
    return (
        f"{world} ranks are too many for this machine alone: {why}; start it where the job will run: "
        f"{', or '.join(ways)} (--nproc {world} starts all of them here)"
    )
