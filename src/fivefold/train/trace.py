"""A few steps of a job on ranks of this machine, traced."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fivefold.job.config import Job, read_job
from fivefold.job.preflight import preflight
from fivefold.launch import ranks
from fivefold.support.documents import path_of
from fivefold.support.errors import UserError
from fivefold.trace.records import Trace
from fivefold.trace.result import TraceFile, TraceResult

STEPS = 3


def trace(
    job: str | Path | Job | None = None,
    changes: Sequence[str] = (),
    *,
    output: str | Path = "trace.json",
    timeout: float = 600.0,
) -> TraceResult:
    """Run a few steps of a job, write what every rank did to `output`, and sum up where the time went.

        ff.trace("examples/demo.toml", ["trace.steps=2"], output="trace.json")

    Starts the layout's ranks on this machine. `changes` are KEY=VALUE; trace.after and trace.steps say which steps.
    """
    file = TraceFile(Path(output))
    if not file.path.expanduser().absolute().parent.is_dir():
        raise UserError(f"--output {output}: there is no directory {file.path.parent}")
    whole, replace = job if isinstance(job, Job) else read_job(_of_a_job(job), changes), msgspec.structs.replace
    traced = replace(whole.trace, steps=whole.trace.steps or STEPS)
    steps = max(0, traced.after) + max(1, traced.steps)  # the warm-up and the traced steps, and no evaluation
    short = replace(whole, train=replace(whole.train, steps=steps, eval_samples=0), trace=traced)
    preflight(short, short.layout.world)
    file(ranks.run(short.layout.world, "fivefold.train.trace:trace_rank", short, timeout=timeout)[0])
    assert file.result is not None
    return file.result


def _of_a_job(given: str | Path | None) -> str | Path | None:
    """Not a run that has been: a trace of it may lie in its directory."""
    path = None if given is None else path_of(given)
    if path is not None and (path.is_dir() or path.suffix == ".json"):
        run = path if path.is_dir() else path.parent
        raise UserError(
            f"{given} is no job file, which trace runs anew; `fivefold report run {run}` shows a run's trace"
        )
    return given


def trace_rank(rank: ranks.Rank, job: Job) -> Trace | None:
    """One rank of the traced run. Rank 0 returns the trace of all ranks."""
    from fivefold.launch.device import choose_backend, choose_device, make_repeatable
    from fivefold.parallel.mesh import Mesh
    from fivefold.train.loop import Trainer

    device = choose_device(job.train.device, rank.number)
    make_repeatable(job.train)
    if rank.world > 1:
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    kept: list[Trace] = []
    Trainer(job, preflight(job, rank.world), Mesh.of(job.layout, device, spec=job.model)).run([], kept.append)
    return kept[0] if kept else None
