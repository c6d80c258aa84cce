"""`fivefold train`: run a job."""

import faulthandler
import json
import os
import platform
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer
from rich.console import Console

from fivefold.cli.options import Json, RunWords, split
from fivefold.launch import faults
from fivefold.launch.exits import INTERRUPTED, STOPPING, TERMINATED, say, say_ended, signal_name
from fivefold.support.errors import UserError
from fivefold.support.progress import shown

if TYPE_CHECKING:
    from fivefold.job.config import Job
    from fivefold.job.preflight import Sources
    from fivefold.launch.local import Arrangement, Elastic
    from fivefold.launch.world import World
    from fivefold.trainer.resuming import Start

TRAIN = "Train a model.  [dim]fivefold train job.toml optimizer.lr=3e-4 train.steps=200[/]"
_PATIENCE = 1.0  # seconds for a second Ctrl-C to end in an orderly way
_TRIES = 10  # restarts of an elastic run that are not for lost ranks

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
        help="When ranks are lost for good, go on with those that are left, in the fastest layout for them; when they "
        "are back, grow again. --restarts is then 10 unless given.",
    ),
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Start over in a new directory, once: a restart goes on in it.")]
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
    place of the job file goes on with the job that is stored there, and settings
    after it change that job, but for the model. With --json, the steps of the run are
    printed at its end. Ctrl-C saves one more checkpoint and ends with exit
    code 130; a second Ctrl-C ends at once. SIGTERM, SIGUSR1 and SIGHUP save one,
    too, and end with 143. Under torchrun or Slurm's srun, the same command joins
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
    from fivefold.checkpoint.storage import reach
    from fivefold.job.config import read_job, to_toml
    from fivefold.job.preflight import preflight
    from fivefold.launch.local import launch, sharing_problem, visible_gpus
    from fivefold.launch.world import current_world, wait_for_the_others
    from fivefold.support.progress import late_bar, quiet
    from fivefold.trainer.resuming import Start, directory_named, run_named, stored_job

    path, changes = split(job)
    world = current_world()
    _check(nproc, restarts or 0, elastic, world)
    with _node_named(world):
        if world.meeting.address:
            world.meeting.resolved()  # before torch is imported, and data hashed
        directory = run_named(path)
        resolved = stored_job(directory, changes) if directory else read_job(path, changes)
        start = Start(None if fresh else directory_named(directory, resolved), fresh)
        ranks = nproc if nproc > 1 else world.size
        asked = resolved
        if elastic:
            resolved, world = _arranged(resolved, ranks, world)
            ranks = resolved.layout.world
        if check and resolved.run.cluster and ranks == 1:  # a job for a cluster is checked on any machine
            ranks = resolved.layout.world
        with late_bar("hashing") as progress:
            sources = preflight(resolved, ranks, quiet if world.rank else progress)
        if resolved.checkpoint.url and not world.rank:
            reach(resolved.checkpoint.url)
    gpus = 0 if resolved.train.device == "cpu" else visible_gpus()
    known = gpus or resolved.train.device == "cpu"  # else ranks, which ask torch, know better
    if nproc > 1 and known and (problem := sharing_problem(resolved.train, gpus, nproc)):
        raise UserError(problem)
    if not world.joined:  # else rank 0 does so for all
        start.checked(resolved, sources)
    if check:
        typer.echo(json.dumps(tomllib.loads(to_toml(resolved))) if as_json else to_toml(resolved))
    elif nproc > 1:
        flags = {"--fresh": fresh, "--json": as_json, "--quiet": not shown()}
        words = ["fivefold", "train", *(job or []), *(flag for flag, wanted in flags.items() if wanted)]
        tries = restarts if restarts is not None else _TRIES if elastic else 0
        how = _elastic(asked, nproc) if elastic else None
        raise typer.Exit(launch(nproc, words, resolved.layout.place, tries, _interrupted(resolved), how))
    elif world.rank >= resolved.layout.world:
        raise typer.Exit(wait_for_the_others(world, resolved.train.timeout))
    else:
        raise typer.Exit(_run(resolved, sources, world, start, as_json))


@contextmanager
def _node_named(world: "World") -> Iterator[None]:
    """What is wrong may be so on this node alone: a file that it does not see, a name that it does not know."""
    try:
        yield
    except UserError as error:
        here = f"rank {world.rank} on {platform.node()}: " if world.apart else ""
        raise UserError(error.framed(here)) from None


def _arranged(job: "Job", ranks: int, world: "World") -> "tuple[Job, World]":
    """The job in the layout for the ranks that are there, and the world of the ranks that it uses."""
    from fivefold.launch.world import PLANNED
    from fivefold.trainer.elastic import choose

    if not job.checkpoint.save:
        raise UserError("--elastic goes on from checkpoints, and checkpoint.save=false makes none", "elastic.save")
    choice = choose(job, ranks, world.local_size if world.joined else ranks)
    if not world.joined:
        return choice.job, world
    os.environ[PLANNED] = f"{choice.took:.3f}"
    if world.rank == 0:
        say(f"elastic: {choice}")
    return choice.job, replace(world, size=choice.job.layout.world)


def _elastic(job: "Job", nproc: int) -> "Elastic":
    """How `--nproc` arranges a job on fewer ranks of this machine."""
    from fivefold.launch.local import Arrangement, Elastic, gpus_here
    from fivefold.trainer.elastic import choose

    def arrange(ranks: int) -> "Arrangement":
        choice = choose(job, ranks, nproc)
        layout = choice.job.layout
        # Always said: the job of a run's directory may be that of fewer ranks by then.
        words = [f"layout={layout}", f"elastic.whole={choice.job.elastic.whole}"]
        said = f"elastic: {choice}" if layout != job.layout else ""
        return Arrangement(layout.world, layout.place, words, said, choice.took)

    gpus = 0 if job.train.device == "cpu" else len(gpus_here())
    return Elastic(arrange, gpus, job.elastic.probe)


def _check(nproc: int, restarts: int, elastic: bool, world: "World") -> None:
    """Options that make no sense, alone or together."""
    check_ranks(nproc, world)
    if elastic and nproc == 1 and not world.joined:
        raise UserError("--elastic needs ranks to lose: --nproc 2 or more, torchrun, or Slurm", "elastic.ranks")
    if restarts < 0:
        raise UserError(f"--restarts {restarts} must not be negative; nearest: --restarts 0", "option.range")
    if restarts and nproc == 1:
        raise UserError("--restarts needs --nproc: other launchers restart their own ranks", "option.conflict")


def check_ranks(nproc: int | None, world: "World") -> None:
    faults.parse(os.environ.get("FIVEFOLD_FAULT", ""))
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc} starts no process; nearest: --nproc 1", "option.range")
    if nproc is not None and nproc > 1 and world.joined:
        raise UserError(
            f"--nproc {nproc} inside a launched rank (world of {world.size}): leave --nproc to one of the two",
            "option.conflict",
        )


def _run(job: "Job", sources: "Sources", world: "World", start: "Start", as_json: bool) -> int:
    """As the one rank that this process is; the exit code."""
    again = not world.joined or bool(world.meeting.file)  # other launchers decide about it
    stop = _Stop(_interrupted(job, again), world)  # before torch is imported, which takes seconds
    from fivefold.trainer.loop import Stopped
    from fivefold.trainer.run import run_job

    out = _Lasting(sys.stdout)
    console = Console(file=cast(IO[str], out), highlight=False, quiet=world.rank > 0 or as_json)
    if not faulthandler.is_enabled():  # by our own launcher
        faulthandler.enable()
    try:
        directory = run_job(job, sources, world, console, start, lambda: bool(stop.signal))
        if as_json and world.rank == 0:
            from fivefold.trainer.result import TrainResult

            print(json.dumps(TrainResult.read(directory).to_dict()), file=cast(IO[str], out))
    except Stopped as stopped:
        by = signal_name(stop.signal) if stop.signal else "a signal to another rank"
        command = f"'fivefold train {stopped.directory}'" if start.fresh else "the same command"
        saved = f"its checkpoint is saved, and {command} resumes from it"
        how = saved if job.checkpoint.save else "nothing is saved: checkpoint.save=false"
        console.print(f"stopped by {by} after step {stopped.step}; {how}", soft_wrap=True)
        return INTERRUPTED if stop.signal == signal.SIGINT else TERMINATED if job.checkpoint.save else 1
    except KeyboardInterrupt:
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


def _interrupted(job: "Job", again: bool = True) -> str:
    """What a first Ctrl-C is answered with, where it may be pressed `again`."""
    saving = " and its checkpoint" if job.checkpoint.save else ""
    return f"stopping after this step{saving}" + ("; Ctrl-C again ends at once" if again else "")


class _Stop:
    """The signal to stop, which waits for a step; Ctrl-C says `sentence` first, and a second one waits for nothing.

    Ranks of a launcher leave the second to it: one Ctrl-C may reach them twice, from the terminal and from there.
    """

    def __init__(self, sentence: str, world: "World") -> None:
        self.signal, self.sentence, self.alone = 0, sentence, not world.joined
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGINT is in the background, and SIGHUP under nohup
                signal.signal(number, self._end)
        if world.rank == 0:
            # Handlers wait until the main thread is out of a kernel, a compiler or a read; this thread does not.
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(reading,), daemon=True).start()

    def _end(self, number: int, _: object) -> None:
        if self.alone and number == self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def _listen(self, pipe: int) -> None:
        pressed = 0
        while True:
            pressed += os.read(pipe, 1) == bytes([signal.SIGINT])
            if pressed == 1 and self.sentence:
                say(self.sentence)
                self.sentence = ""
            if pressed == 2 and self.alone:
                threading.Timer(_PATIENCE, os._exit, [INTERRUPTED]).start()
                say_ended()
                return
