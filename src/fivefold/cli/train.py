"""`fivefold train`: run a job."""

import faulthandler
import os
import signal
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer
from rich.console import Console

from fivefold.cli.job_args import JobWords, split
from fivefold.launch import faults
from fivefold.launch.ends import STOPPING, signal_name
from fivefold.support.errors import PeerLost, UserError

if TYPE_CHECKING:
    from fivefold.job.config import Job
    from fivefold.job.preflight import Sources
    from fivefold.launch.world import World

SHORT = "Train a model.  [dim]fivefold train job.toml optimizer.lr=3e-4 train.steps=200[/]"


def train(
    job: JobWords = None,
    nproc: Annotated[int, typer.Option(help="Processes to start on this machine; 1 runs in this one.")] = 1,
    restarts: Annotated[
        int,
        typer.Option(
            help="With --nproc: how often to restart from the last checkpoint when a rank fails; the same failure "
            "twice in a row is not tried again."
        ),
    ] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over in a new directory, once: a restart goes on in it.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check the job and print it resolved; do not train.")] = False,
) -> None:
    """Train a model; without a job file, a small Llama on the Python standard library.

    A job has the sections model, layout, data, optimizer, train, checkpoint, trace
    and run, and every setting has a default. The resolved job is printed, and saved
    with the run's metrics and checkpoints in a directory below run.dir. If that
    directory has a checkpoint, the run resumes from it, in whatever layout the job
    now has. SIGTERM, SIGUSR1 and SIGHUP save one more checkpoint and end with exit
    code 143. Under torchrun or Slurm's srun, the same command joins the ranks that
    they started.

    [dim]Examples:[/]

      fivefold train

      fivefold train job.toml optimizer.lr=3e-4 train.steps=200

      fivefold train model=tiny-gpt layout.recompute=full layout.microbatches=4

      fivefold train data.path=tokens/ model=small model.vocab=50257

      fivefold train job.toml --nproc 4 layout=tp=2,pp=2 --restarts 3

      fivefold train job.toml --fresh checkpoint.every=50 checkpoint.keep=3

      fivefold train job.toml --check
    """
    from fivefold.data.progress import late_bar, quiet
    from fivefold.job.config import read_job, to_toml
    from fivefold.job.preflight import preflight
    from fivefold.launch.local import launch
    from fivefold.launch.world import current_world

    path, changes = split(job)
    world = current_world()
    _check(nproc, restarts, world)
    resolved = read_job(path, changes)
    ranks = nproc if nproc > 1 else world.size
    if check and resolved.run.cluster and ranks == 1:  # a job for a cluster is checked on any machine
        ranks = resolved.layout.world
    with late_bar("hashing") as progress:
        sources = preflight(resolved, ranks, quiet if world.rank else progress)
    if check:
        typer.echo(to_toml(resolved))
    elif nproc > 1:
        words = ["fivefold", "train", *(job or []), *(["--fresh"] if fresh else [])]
        raise typer.Exit(launch(nproc, words, resolved.layout.place, restarts))
    else:
        raise typer.Exit(_run(resolved, sources, world, fresh))


def _check(nproc: int, restarts: int, world: "World") -> None:
    """Options that make no sense, alone or together."""
    check_ranks(nproc, world)
    if restarts < 0:
        raise UserError(f"--restarts {restarts} must not be negative; nearest: --restarts 0")
    if restarts and nproc == 1:
        raise UserError("--restarts needs --nproc: other launchers restart their own ranks")


def check_ranks(nproc: int | None, world: "World") -> None:
    faults.parse(os.environ.get("FIVEFOLD_FAULT", ""))
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc} starts no process; nearest: --nproc 1")
    if nproc is not None and nproc > 1 and world.joined:
        raise UserError(
            f"--nproc {nproc} inside a launched rank (world of {world.size}): leave --nproc to one of the two"
        )


def _run(job: "Job", sources: "Sources", world: "World", fresh: bool) -> int:
    """As the one rank that this process is; the exit code."""
    from fivefold.launch.local import INTERRUPTED, TERMINATED
    from fivefold.train.loop import Stopped
    from fivefold.train.run import run_job

    out = _Lasting(sys.stdout)
    console = Console(file=cast(IO[str], out), highlight=False, quiet=world.rank > 0)
    stop = _Stop()
    if not faulthandler.is_enabled():  # by our own launcher
        faulthandler.enable()
    try:
        run_job(job, sources, world, console, fresh, lambda: bool(stop.signal))
    except Stopped as stopped:
        by = signal_name(stop.signal) if stop.signal else "a signal to another rank"
        saved = "its checkpoint is saved, and the same command resumes from it"
        how = saved if job.checkpoint.save else "nothing is saved: checkpoint.save=false"
        console.print(f"stopped by {by} after step {stopped.step}; {how}")
        return TERMINATED if job.checkpoint.save else 1
    except (KeyboardInterrupt, RuntimeError, PeerLost) as error:
        # A rank that is told to stop may first see the end of its connection to one that has stopped already.
        if not isinstance(error, KeyboardInterrupt) and not stop.interrupted:
            raise
        console.print("stopped; metrics and checkpoints up to here are kept")
        return INTERRUPTED
    finally:
        out.end()
    return 0


class _Lasting:
    """Standard output that may fail: a closed terminal or pipe, a full disk. Training goes on without it."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()

    def end(self) -> None:
        """Python would end with exit code 120 for what it still holds."""
        try:
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


class _Stop:
    """Whether Ctrl-C was pressed, for exceptions that come of it; and the signal to stop, which waits for a step."""

    def __init__(self) -> None:
        self.interrupted, self.signal = False, 0
        for number, answer in ({signal.SIGINT: self._interrupt} | dict.fromkeys(STOPPING, self._end)).items():
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGINT is in the background, and SIGHUP under nohup
                signal.signal(number, answer)

    def _interrupt(self, *_: object) -> None:
        self.interrupted = True
        raise KeyboardInterrupt

    def _end(self, number: int, _: object) -> None:
        self.signal = number
