"""`ff.train` and `ff.trace`: train or trace a job from Python, on ranks that are other processes."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from fivefold.checkpoint.storage import check_storage_is_writable
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.job.reading import read_job
from fivefold.launch import faults, processes
from fivefold.launch.exits import INTERRUPTED
from fivefold.launch.host import keep_freed_memory
from fivefold.launch.local import Arrangement, Launcher, check_sharing
from fivefold.launch.world import World, current_world
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.parsing import path_of
from fivefold.support.ranges import MAX_RANKS, MAX_STEPS, check_range, within
from fivefold.tracing.records import Trace
from fivefold.tracing.result import TraceFile, TraceResult
from fivefold.trainer.rank import stopping_text
from fivefold.trainer.records import Step
from fivefold.trainer.report import Follower
from fivefold.trainer.result import TrainResult
from fivefold.trainer.resuming import Start, directory_named, job_of_run, run_named, with_moved_weights


def train(
    job: str | Path | Job | None = None,
    changes: Sequence[str] = (),
    *,
    nproc: int | None = None,
    restarts: int = 0,
    fresh: bool = False,
    progress: Callable[[str], object] = lambda line: None,
    on_record: Callable[[Step], object] = lambda record: None,
) -> TrainResult:
    """Trains a job on ranks of this machine, and returns its losses and its directory.

        >>> losses = ff.train(None, ["layout=dp=2", "data.seq=32", "train.steps=2", "run.name=small"]).losses
        >>> result = ff.train("runs/small", ["train.steps=4"], on_record=lambda step: print(step.step))
        3
        4

    `job` is a job file, the directory of a run to resume, or an object (default: a small Llama on Python's own
    source), `changes` are KEY=VALUE. `nproc` is the number of ranks (default: as many as the layout has), and
    `restarts` how often they are restarted from the last checkpoint after a failure. A run that has a checkpoint
    resumes from it, unless `fresh` asks for a new directory. `progress` is called with every line that the run prints,
    and `on_record` with the record of every step, once more for steps that a restart repeats.

    The ranks are other processes, so that a notebook holds neither their memory nor their process group. A run that
    fails raises TrainingError, which names the rank. After Ctrl-C the ranks save a checkpoint, and KeyboardInterrupt is
    raised; a second one ends them at once, and so does an exception in a callback.
    """
    resolved, start = job_and_start(job, changes, fresh=fresh)
    ranks = resolved.layout.world if nproc is None else nproc
    check_ranks(ranks, current_world())
    check_restarts(restarts)
    sources = preflight(resolved, ranks)
    if resolved.checkpoint.url:
        check_storage_is_writable(resolved.checkpoint.url)
    check_sharing(resolved.train, ranks)
    start.checked(resolved, sources)
    keep_freed_memory()
    with ExitStack() as stack:
        report = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fivefold-train-")), "report")
        follower = stack.enter_context(closing(Follower(report, progress, on_record)))
        launcher = Launcher(
            "fivefold.trainer.rank:train_rank",
            Arrangement(ranks, resolved.layout.place, (resolved, start, report)),
            stopping_text(resolved),
            attached=False,
            say=follower.say,
            look=follower.poll,
        )
        code = launcher.run(restarts)
        follower.poll()  # the launcher's last sentences
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise follower.refusal() if code == 2 else follower.failure(code)
    if follower.directory is None:
        raise TrainingError(f"all steps are done, but {tempfile.gettempdir()} had no room for what the ranks reported")
    return TrainResult.read(follower.directory)


def job_and_start(job: str | Path | Job | None, changes: Sequence[str], *, fresh: bool) -> tuple[Job, Start]:
    """The job to train, and the directory to train it in."""
    if isinstance(job, Job):
        if changes:
            raise UserError(
                f"{changes[0]!r} changes a job that is given as an object; change the object instead", "change.object"
            )
        return job, Start(None, fresh=fresh)
    run = run_named(str(job) if job else None)
    resolved = job_of_run(run, changes) if run else with_moved_weights(read_job(job and str(job), list(changes)), job)
    return resolved, Start(None if fresh else directory_named(run, resolved), fresh=fresh)


def check_ranks(nproc: int | None, world: World) -> None:
    """Raises UserError for a number of processes that cannot be started here, and for a bad FIVEFOLD_FAULT."""
    faults.parse(os.environ.get("FIVEFOLD_FAULT", ""))
    check_range("nproc", nproc, within(1, MAX_RANKS))
    if nproc is not None and nproc > 1 and world.joined:
        raise UserError(
            f"--nproc {nproc} inside a launched rank (world of {world.size}): leave --nproc to one of the two",
            "option.conflict",
        )


def check_restarts(restarts: int) -> None:
    check_range("restarts", restarts, within(0, MAX_STEPS))


# ---- trace ----------------------------------------------------------------------------------------------------------
# A few steps of a job on ranks of this machine, traced.


_TRACED_STEPS = 3  # steps, where the job does not say


def trace(
    job: str | Path | Job | None = None,
    changes: Sequence[str] = (),
    *,
    output: str | Path = "trace.json",
    timeout: float = 600.0,
) -> TraceResult:
    """Runs a few steps of a job, writes a trace of all ranks to `output`, and returns a summary of their time.

        >>> ff.trace("examples/demo.toml", ["layout=dp=2", "trace.steps=1"], output="trace.json").ok
        True

    Starts the ranks of the `job`, a file or an object, on this machine; they have `timeout` seconds. `changes` are
    KEY=VALUE; trace.after and trace.steps say which steps.
    """
    file = TraceFile(Path(output))
    if not file.path.expanduser().absolute().parent.is_dir():
        raise UserError(f"--output {output}: there is no directory {file.path.parent}", "file.write")
    replace = msgspec.structs.replace
    full = job if isinstance(job, Job) else read_job(_checked_job_file(job), changes)
    trace_config = replace(full.trace, steps=full.trace.steps or _TRACED_STEPS)
    steps = max(0, trace_config.after) + max(1, trace_config.steps)  # the warm-up and the traced steps, no evaluation
    short = replace(full, train=replace(full.train, steps=steps, eval_samples=0), trace=trace_config)
    preflight(short, short.layout.world)
    file(processes.run(short.layout.world, "fivefold.trainer.start:trace_rank", short, timeout=timeout)[0])
    assert file.result is not None
    return file.result


def _checked_job_file(job: str | Path | None) -> str | Path | None:
    """The path of a job file as it is; UserError for a run's directory or a trace, whose trace may be meant."""
    path = None if job is None else path_of(job)
    if path is not None and (path.is_dir() or path.suffix == ".json"):
        run = path if path.is_dir() else path.parent
        raise UserError(
            f"{job} is not a job file, and trace runs one; `fivefold inspect {run} --html FILE` shows a run's trace",
            "job.kind",
        )
    return job


def trace_rank(rank: processes.Rank, job: Job) -> Trace | None:
    """One rank of the traced run. Rank 0 returns the trace of all ranks."""
    from fivefold.launch.device import choose_backend, choose_device, make_repeatable
    from fivefold.parallel.mesh import Mesh
    from fivefold.trainer.loop import Trainer

    device = choose_device(job.train.device, rank.number)
    make_repeatable(job.train)
    if rank.world > 1:
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    traces: list[Trace] = []
    Trainer(job, preflight(job, rank.world), Mesh.of_job(job, device)).run([], traces.append)
    return traces[0] if traces else None
