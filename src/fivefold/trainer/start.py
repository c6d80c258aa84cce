"""Train a job from Python: `fivefold train` in processes of its own, and what it leaves."""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from fivefold.job.config import Job, read_job, to_toml
from fivefold.job.preflight import preflight
from fivefold.launch import processes
from fivefold.launch.world import RUN
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.parsing import path_of
from fivefold.tracing.records import Trace
from fivefold.tracing.result import TraceFile, TraceResult
from fivefold.trainer.directories import directory_of
from fivefold.trainer.result import TrainResult
from fivefold.trainer.resuming import directory_named, run_named, stored_job


def train(
    job: str | Path | Job | None = None,
    changes: Sequence[str] = (),
    *,
    nproc: int | None = None,
    restarts: int = 0,
    fresh: bool = False,
    progress: Callable[[str], object] = lambda line: None,
) -> TrainResult:
    """Train a job on ranks of this machine, and return its losses and its directory.

        ff.train("examples/demo.toml", ["train.steps=50"]).losses
        ff.train("runs/demo", ["train.steps=300"], progress=print)

    `job` is a job file, the directory of a run to go on with, or an object (default: a small Llama on Python's own
    source), `changes` are KEY=VALUE. `nproc` is the number of ranks (default: as many as the layout has). A run that
    has a checkpoint resumes from it, unless `fresh` asks for a new directory. `progress` gets every line that the run
    prints. A run that fails is a TrainingError.

    The ranks are other processes, so that a notebook holds neither their memory nor their process group.
    """
    if isinstance(job, Job) and changes:
        raise UserError(f"{changes[0]!r} changes a job that is given by name; change the object instead")
    run = None if isinstance(job, Job) else run_named(str(job) if job else None)
    if run:
        resolved = stored_job(run, changes)
    else:
        resolved = job if isinstance(job, Job) else read_job(job and str(job), list(changes))
    ranks = resolved.layout.world if nproc is None else nproc
    preflight(resolved, ranks)
    with tempfile.TemporaryDirectory(prefix="fivefold-train-") as home:
        file = Path(home, "job.toml")
        file.write_text(to_toml(resolved))
        words = [str(run), *changes] if run else [str(file)]
        command = [sys.executable, "-m", "fivefold", "train", *words, "--nproc", str(ranks)]
        command += [*(["--restarts", str(restarts)] if restarts else []), *(["--fresh"] if fresh else [])]
        with Path(home, "errors").open("w+") as errors:
            env = {RUN: uuid.uuid4().hex, **os.environ}
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env) as ranked:
                assert ranked.stdout is not None
                for line in ranked.stdout:
                    progress(line.rstrip("\n"))
            errors.seek(0)
            _judge(ranked.returncode, errors.read().splitlines())
    named = directory_named(run, resolved)
    return TrainResult.read(named if named and not fresh else directory_of(resolved, env))


def _judge(code: int, errors: list[str]) -> None:
    sentences = [line.removeprefix("error: ") for line in errors if line.startswith("error: ")]
    if code == 2:
        raise UserError(sentences or errors[-1:])
    if code:
        raise TrainingError("\n".join(sentences or errors[-20:]) or f"the run ended with exit code {code}")


# ---- trace ----------------------------------------------------------------------------------------------------------
# A few steps of a job on ranks of this machine, traced.


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
    file(processes.run(short.layout.world, "fivefold.trainer.start:trace_rank", short, timeout=timeout)[0])
    assert file.result is not None
    return file.result


def _of_a_job(given: str | Path | None) -> str | Path | None:
    """Not a run that has been: a trace of it may lie in its directory."""
    path = None if given is None else path_of(given)
    if path is not None and (path.is_dir() or path.suffix == ".json"):
        run = path if path.is_dir() else path.parent
        raise UserError(
            f"{given} is no job file, which trace runs anew; `fivefold inspect {run} --html FILE` shows a run's trace"
        )
    return given


def trace_rank(rank: processes.Rank, job: Job) -> Trace | None:
    """One rank of the traced run. Rank 0 returns the trace of all ranks."""
    from fivefold.launch.device import choose_backend, choose_device, make_repeatable
    from fivefold.parallel.mesh import Mesh
    from fivefold.trainer.loop import Trainer

    device = choose_device(job.train.device, rank.number)
    make_repeatable(job.train)
    if rank.world > 1:
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    kept: list[Trace] = []
    Trainer(job, preflight(job, rank.world), Mesh.of(job.layout, device, spec=job.model)).run([], kept.append)
    return kept[0] if kept else None
