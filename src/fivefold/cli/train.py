"""`fivefold train`: a job file, changes on top, and a run."""

import signal
from typing import Annotated

import typer
from rich.console import Console

from fivefold.cli.words import JobWords, split
from fivefold.errors import PeerLost, UserError

SHORT = "Train a model.  [dim]fivefold train job.toml optimizer.lr=3e-4 train.steps=200[/]"


def train(
    job: JobWords = None,
    nproc: Annotated[int, typer.Option(help="Processes to start on this machine; 1 runs in this one.")] = 1,
    check: Annotated[
        bool, typer.Option("--check", help="Check the job and print it resolved, without training.")
    ] = False,
) -> None:
    """Train a model as a job file says; without one, a small Llama on Python's own source.

    A job has the sections model, layout, data, optimizer, train, trace and run,
    and every setting has a default. The resolved job is printed, and saved with the
    run's metrics in a new directory below run.dir. Under torchrun or Slurm's
    srun the same command joins the ranks that they started.

    [dim]Examples:[/]

      fivefold train

      fivefold train job.toml optimizer.lr=3e-4 train.steps=200

      fivefold train model=tiny-gpt layout.recompute=full layout.microbatches=4

      fivefold train data.path=tokens/ model=small model.vocab=50257

      fivefold train job.toml --check
    """
    from fivefold.train.config import read_job, to_toml
    from fivefold.train.launch import launch
    from fivefold.train.preflight import preflight
    from fivefold.train.world import current_world

    path, changes = split(job)
    if nproc < 1:
        raise UserError(f"--nproc {nproc} starts no process; nearest: --nproc 1")
    world = current_world()
    if nproc > 1 and world.joined:
        raise UserError(
            f"--nproc {nproc} inside a launched rank (world of {world.size}): leave --nproc to one of the two"
        )
    resolved = read_job(path, changes)
    sources = preflight(resolved, nproc if nproc > 1 else world.size)
    if check:
        typer.echo(to_toml(resolved))
        return
    if nproc > 1:
        raise typer.Exit(launch(nproc, ["fivefold", "train", *(job or [])]))
    from fivefold.train.run import run_job

    console = Console(highlight=False, quiet=world.rank > 0)
    stopping = _Stop()
    try:
        run_job(resolved, sources, world, console)
    except (KeyboardInterrupt, RuntimeError, PeerLost) as error:
        # A rank that is told to stop may first see the end of its connection to one that has stopped already.
        if not isinstance(error, KeyboardInterrupt) and not stopping.asked:
            raise
        console.print("stopped; the metrics up to here are kept")
        raise typer.Exit(130) from None


class _Stop:
    """Whether Ctrl-C was pressed, for exceptions that come of it."""

    def __init__(self) -> None:
        self.asked = False
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True
        raise KeyboardInterrupt
