"""`fivefold train`: run a job."""

import json
import os
import platform
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer
from rich.console import Console

from fivefold.cli.options import Json, RunWords, split_job_and_changes
from fivefold.launch.exits import say
from fivefold.support.errors import Note, UserError
from fivefold.support.progress import is_shown

if TYPE_CHECKING:
    from fivefold.data.rows import Splits
    from fivefold.job.config import Job
    from fivefold.launch.local import Arrangement, Elastic
    from fivefold.launch.world import World
    from fivefold.trainer.resuming import Start

TRAIN = "Train a model.  [dim]fivefold train job.toml optimizer.lr=3e-4 train.steps=200[/]"
_ELASTIC_RESTARTS = 10  # the default of --restarts for an elastic run; restarts for lost ranks do not count

_Nproc = Annotated[int, typer.Option(help="Processes to start on this machine; 1 runs in this one.")]
_Restarts = Annotated[
    int | None,
    typer.Option(
        help="With --nproc: how often to restart from the last checkpoint when a rank fails; the same failure "
        "twice in a row is not tried again."
    ),
]
_Elastic = Annotated[
    bool,
    typer.Option(
        "--elastic",
        help="If ranks are lost, continue on the remaining ones in the fastest layout; scale back up when they return. "
        "--restarts defaults to 10 then.",
    ),
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Start over in a new directory; restarts resume in it.")]
_Check = Annotated[bool, typer.Option("--check", help="Check the job and print it resolved; do not train.")]


def train(
    job: RunWords = None,
    nproc: _Nproc = 1,
    restarts: _Restarts = None,
    elastic: _Elastic = False,
    fresh: _Fresh = False,
    check: _Check = False,
    as_json: Json = False,
) -> None:
    """Train a model; without a job file, a small Llama on the Python standard library.

    A job has the sections model, layout, data, optimizer, train, checkpoint,
    watch, elastic, trace and run, and every setting has a default. --check
    prints the resolved job, and a run saves it as job.toml, with its metrics and
    checkpoints, in a directory below run.dir. If that directory has a
    checkpoint, the run resumes from it, in whatever layout the job now has; a
    job of another model, data or loss curve is refused. A run's directory in
    place of the job file resumes the job that is stored there, and settings
    after it change that job, except for the model. With --json, the steps of the run are
    printed at its end. Ctrl-C saves one more checkpoint and ends with exit
    code 130; a second Ctrl-C ends at once. SIGTERM, SIGUSR1 and SIGHUP also save
    one, and end with 143. Under torchrun or Slurm's srun, the same command joins
    the ranks that they started.

    [dim]Examples:[/]

      fivefold train

      fivefold train job.toml optimizer.lr=3e-4 train.steps=200

      fivefold train model=tiny-gpt layout.recompute=full layout.microbatches=4

      fivefold train data.path=tokens/ model=small

      fivefold train job.toml --nproc 4 layout=tp=2,pp=2 --restarts 3

      fivefold train runs/job train.steps=400 optimizer.schedule_steps=400

      fivefold train runs/job layout=tp=2 --nproc 2 --restarts 3

      fivefold train job.toml --nproc 8 --elastic elastic.least=4

      fivefold train job.toml --fresh checkpoint.every=50 checkpoint.keep=3

      fivefold train job.toml --check
    """
    from fivefold.clusters.machines import check_sharing_there
    from fivefold.job.toml_writer import to_toml
    from fivefold.launch.group import wait_for_the_others
    from fivefold.launch.local import check_sharing
    from fivefold.launch.world import current_world
    from fivefold.trainer.start import job_and_start

    path, changes = split_job_and_changes(job)
    world = current_world()
    _check_options(nproc, restarts or 0, world, elastic=elastic)
    with _name_node(world):
        if world.meeting.address:
            world.meeting.resolved()  # fails before torch is imported, and data hashed
        full_job, start = job_and_start(path, changes, fresh=fresh)
        ranks = nproc if nproc > 1 else world.size
        resolved, world = _arrange(full_job, ranks, world) if elastic else (full_job, world)
        elsewhere = check and resolved.run.cluster and ranks == 1  # a job for a cluster is checked on any machine
        sources = _check_and_open_data(resolved, resolved.layout.world if elastic or elsewhere else ranks, world)
    if elsewhere:
        check_sharing_there(resolved)
    check_sharing(resolved.train, nproc)
    if not world.joined:  # else rank 0 checks it for all
        start.checked(resolved, sources)
    if check:
        for sentence in sources.notes:
            warnings.warn(Note(sentence), stacklevel=1)
        typer.echo(json.dumps(tomllib.loads(to_toml(resolved))) if as_json else to_toml(resolved))
    elif nproc > 1:
        flags = {"--fresh": fresh, "--json": as_json, "--quiet": not is_shown()}
        words = ["fivefold", "train", *(job or []), *(flag for flag, wanted in flags.items() if wanted)]
        if restarts is None:
            restarts = _ELASTIC_RESTARTS if elastic else 0
        on_lost_ranks = _elastic(full_job, nproc, words) if elastic else None
        raise typer.Exit(_launch(resolved, nproc, words, restarts, on_lost_ranks))
    elif world.rank >= resolved.layout.world:
        raise typer.Exit(wait_for_the_others(world, resolved.train.timeout))
    else:
        raise typer.Exit(_run(resolved, sources, world, start, as_json=as_json))


def _check_and_open_data(job: "Job", ranks: int, world: "World") -> "Splits":
    """Check the job, its data and the storage of its checkpoints; returns the data."""
    from fivefold.checkpoint.storage import check_storage_is_writable
    from fivefold.job.preflight import preflight
    from fivefold.support.progress import late_bar, quiet

    with late_bar("hashing") as progress:
        sources = preflight(job, ranks, quiet if world.rank else progress)
    if job.checkpoint.url and not world.rank:
        check_storage_is_writable(job.checkpoint.url)
    return sources


@contextmanager
def _name_node(world: "World") -> Iterator[None]:
    """Put the rank and node before problems that may be this node's alone, such as a missing file."""
    try:
        yield
    except UserError as error:
        prefix = f"rank {world.rank} on {platform.node()}: " if world.apart else ""
        raise UserError(error.framed(prefix)) from None


def _arrange(job: "Job", ranks: int, world: "World") -> "tuple[Job, World]":
    """The job in the layout for so many ranks, and the world of the ranks that this layout uses."""
    from fivefold.launch.world import PLANNED_ENV
    from fivefold.trainer.elastic_layout import choose

    if not job.checkpoint.save:
        raise UserError("--elastic resumes from checkpoints, but checkpoint.save=false writes none", "elastic.save")
    choice = choose(job, ranks, world.local_size if world.joined else ranks)
    if not world.joined:
        return choice.job, world
    os.environ[PLANNED_ENV] = f"{choice.search_seconds:.3f}"
    if world.rank == 0:
        say(f"elastic: {choice}")
    return choice.job, replace(world, size=choice.job.layout.world)


def _launch(job: "Job", nproc: int, words: list[str], restarts: int, elastic: "Elastic | None") -> int:
    """Start the command again, as ranks of this machine; returns the exit code."""
    from fivefold.launch.local import launch
    from fivefold.trainer.rank import stopping_text

    return launch(nproc, words, job.layout.place, restarts, stopping_text(job), elastic)


def _elastic(job: "Job", nproc: int, words: list[str]) -> "Elastic":
    """How `--nproc` arranges a job on fewer ranks of this machine."""
    from fivefold.launch.local import Arrangement, Elastic, gpus_here
    from fivefold.trainer.elastic_layout import choose

    def arrange(ranks: int) -> "Arrangement":
        choice = choose(job, ranks, nproc)
        layout = choice.job.layout
        # Always given, as the job stored in the run's directory may have the layout of fewer ranks.
        arguments = [*words, f"layout={layout}", f"elastic.whole={choice.job.elastic.whole}"]
        note = f"elastic: {choice}" if layout != job.layout else ""
        return Arrangement(layout.world, layout.place, (arguments,), note, choice.search_seconds)

    gpus = 0 if job.train.device == "cpu" else len(gpus_here())
    return Elastic(arrange, gpus, job.elastic.probe)


def _check_options(nproc: int, restarts: int, world: "World", *, elastic: bool) -> None:
    """Refuse options that contradict each other or the launcher."""
    from fivefold.trainer.start import check_ranks, check_restarts

    check_ranks(nproc, world)
    if elastic and nproc == 1 and not world.joined:
        raise UserError("--elastic needs ranks to lose: --nproc 2 or more, torchrun, or Slurm", "elastic.ranks")
    check_restarts(restarts)
    if restarts and nproc == 1:
        raise UserError("--restarts needs --nproc: other launchers restart their own ranks", "option.conflict")


def _run(job: "Job", sources: "Splits", world: "World", start: "Start", *, as_json: bool) -> int:
    """Run the one rank that this process is; returns the exit code."""
    from fivefold.trainer.rank import run_rank
    from fivefold.trainer.result import TrainResult

    out = _IgnoringErrors(sys.stdout)
    console = Console(file=cast(IO[str], out), highlight=False, quiet=world.rank > 0 or as_json)
    try:
        end = run_rank(job, sources, world, start, console)
        if as_json and world.rank == 0 and end.directory:
            print(json.dumps(TrainResult.read(end.directory).to_dict()), file=cast(IO[str], out))
    finally:
        out.end()
    return end.code


class _IgnoringErrors:
    """Standard output that ignores errors: training continues after a terminal or pipe is closed, or on a full disk."""

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
        """Flush what is left; if that fails, discard it, as Python would otherwise end with exit code 120."""
        try:
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
