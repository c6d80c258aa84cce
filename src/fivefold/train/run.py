"""Runs a job: finds its directory, joins the ranks, resumes, trains, and prints what a person reads."""

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import fivefold
from fivefold.checkpoint.store import Store
from fivefold.data.entropy import entropy
from fivefold.job.config import Job, to_toml
from fivefold.job.preflight import Sources
from fivefold.launch import world as worlds
from fivefold.launch.device import check_bfloat16, check_memory, choose_device, make_repeatable
from fivefold.launch.ends import lost_peer
from fivefold.launch.world import RESTARTS, RUN
from fivefold.model.compiled import compilation
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh, backend
from fivefold.report.terminal import render, width_of
from fivefold.schedule.text import save, to_text
from fivefold.support.errors import PeerLost, UserError
from fivefold.support.formatting import graphs_text, si
from fivefold.trace.result import TraceFile
from fivefold.train.checkpointing import Checkpoints
from fivefold.train.directories import newest, next_number, numbered
from fivefold.train.display import Display
from fivefold.train.loop import Trainer
from fivefold.train.records import Evaluation, Listener, MetricsFile, TensorBoard, trim

_CLAIMS: list[IO[str]] = []  # open as long as this process lives
_FRESH = "fresh"  # the file that says which run --fresh made a directory for
_COUNTED = 1 << 26  # tokens up to which the corpus is counted before a run: about a second


def run_job(
    job: Job, sources: Sources, world: worlds.World, console: Console, fresh: bool, stopping: Callable[[], bool]
) -> None:
    """Train. Rank 0 alone prints.

    `fresh`: in a new directory, whatever checkpoints there are. `stopping`: whether this rank was asked to stop and
    save.
    """
    try:
        _run_job(job, sources, world, console, fresh, stopping)
    except RuntimeError as error:
        why = lost_peer(error) if world.size > 1 else None
        if why is None:
            raise
        raise PeerLost(f"rank {world.rank} lost its connection to another rank: {why}") from error


def _run_job(
    job: Job, sources: Sources, world: worlds.World, console: Console, fresh: bool, stopping: Callable[[], bool]
) -> None:
    device = choose_device(job.train.device, world.local_rank)
    check_memory(job, device, world)
    make_repeatable(job.train)
    slow = check_bfloat16(device, job.train.dtype)
    worlds.join(world, backend(device, world.local_size), job.train.timeout)

    def note(sentence: str) -> None:
        console.print(Text.assemble(("note  ", "bold yellow"), sentence), soft_wrap=True)

    try:
        mesh = Mesh.of(job.layout, device, job.train.timeout)
        control = Control(mesh)
        directory = _agreed_directory(job, fresh, control)
        job = _with_its_schedule(job, directory, control)
        trainer = Trainer(job, sources, mesh)
        trainer.stopping = stopping
        checkpointing = Checkpoints(Store(directory / "checkpoints"), control, trainer, note)
        if world.rank > 0:
            checkpointing.restore()
            if trainer.done < job.train.steps:
                trainer.run([], checkpointing=checkpointing)
            return
        show_job(console, job, directory)
        begun = checkpointing.restore()
        if begun is not None:
            console.print(f"[bold]resumes[/] from {begun.path}, after step {begun.manifest.step}", soft_wrap=True)
        if trainer.done >= job.train.steps:
            console.print(
                f"all {trainer.done} steps of {directory} are done; --fresh starts over in a directory of its own, and "
                f"train.steps={trainer.done + job.train.steps} continues it",
                soft_wrap=True,
            )
            return
        (directory / "job.toml").write_text(to_toml(job))
        (directory / "environment.json").write_text(json.dumps(environment(mesh, sources), indent=2) + "\n")
        marks = show_corpus(console, sources)
        if slow:
            note(slow)
        earlier = trim(directory / "metrics.jsonl", trainer.done)
        display = Display(console, job.train.steps, marks, job.train.log_every, earlier)
        listeners: list[Listener] = [MetricsFile(directory / "metrics.jsonl"), display]
        if job.run.tensorboard:
            listeners.append(TensorBoard(directory / "tensorboard", trainer.done + 1))
        traced = TraceFile(directory / "trace.json")
        start = time.monotonic()
        try:
            evaluation = trainer.run(listeners, traced, checkpointing)
        finally:
            for listener in listeners:
                listener.close()
        steps = f"{display.steps_here} steps in {time.monotonic() - start:.1f} s"
        for row in display.curve():
            console.print(row, soft_wrap=True)
        console.print(f"{steps}; job, metrics and environment in {directory}", markup=False)
        if evaluation is not None:
            loss = f"[bold]held-out loss {evaluation.held_out_loss:.4f}[/]"
            console.print(f"{loss} nats per token, {verdict(evaluation, marks)}")
        traced.show(console)
        if trainer.engine.compiled:
            console.print(graphs_text(*compilation(), blocks=job.layout.compiles_blocks), soft_wrap=True)
        if job.train.count:
            render(trainer.counted.blocks(), console, width_of(console))
            (directory / "counts.json").write_text(json.dumps(trainer.counted.to_dict(), indent=2) + "\n")
    finally:
        worlds.leave(world)


def _agreed_directory(job: Job, fresh: bool, control: Control) -> Path:
    """Rank 0 finds or makes it, and claims it; if it cannot, all ranks end alike, and rank 0 says why."""
    directory, problems = Path(), []
    if control.rank == 0:
        try:
            directory = run_directory(job, fresh)
            _claim(directory)
        except UserError as error:
            problems = error.problems
    if control.from_first(bool(problems)):
        raise UserError(problems)
    return control.from_first(directory)


def _with_its_schedule(job: Job, directory: Path, control: Control) -> Job:
    """A schedule that comes from a file is kept beside job.toml, so that the run resumes without the original.

    The job of rank 0, which is the one that is written, points there. All ranks must have read the same schedule.
    """
    schedule = job.layout.record.schedule
    if schedule is None:
        return job
    texts = control.from_all(to_text(schedule))
    if strange := [rank for rank, text in enumerate(texts) if text != texts[0]]:
        raise UserError(f"rank {strange[0]} reads another schedule from {job.layout.schedule} than rank 0 does")
    if control.rank > 0:
        return job
    kept = (directory / "schedule.txt").absolute()
    save(schedule, kept)
    return msgspec.structs.replace(job, layout=msgspec.structs.replace(job.layout, schedule=str(kept)))


def _claim(directory: Path) -> None:
    """One process at a time trains in a directory. The claim ends with the process, however that ends."""
    _CLAIMS.append((directory / "claim").open("w"))
    try:
        fcntl.flock(_CLAIMS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process is training in {directory}; --fresh starts a run of its own, and so does another run.name"
        ) from None
    except OSError:  # a file system without locks
        pass


def run_directory(job: Job, fresh: bool) -> Path:
    """The newest of the run's name, NAME, NAME-2, NAME-3 ..., if it has checkpoints to resume from; else a new one.

    What an earlier run left is never deleted.
    """
    parent, name = Path(job.run.dir).expanduser(), job.run.name
    number, last = next_number(parent, name), newest(parent, name)
    if number > 1 and Store(last / "checkpoints").complete() and not (fresh and _other(last)):
        return last
    while True:
        directory = parent / numbered(name, number)
        try:
            directory.mkdir(parents=True)
            if fresh:
                (directory / _FRESH).write_text(os.environ.get(RUN, ""))
            return directory
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"cannot make the run's directory {directory}: {error.strerror}") from None


def _other(directory: Path) -> bool:
    """Whether a directory was made by another run than this one, which launchers start again with the same words."""
    mark = directory / _FRESH
    mine = mark.is_file() and mark.read_text() == os.environ.get(RUN, "")
    return os.environ.get(RESTARTS, "0") == "0" or not mine


def environment(mesh: Mesh, sources: Sources) -> dict[str, object]:
    """What a run was made with, kept beside its metrics."""
    device = mesh.device
    return {
        "fivefold": fivefold.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x {torch.get_num_threads()}",
        "ranks": mesh.world.size,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "data": str(sources.path),
    }


def show_job(console: Console, job: Job, directory: Path) -> None:
    """The resolved job, a paragraph a section."""
    model = f"{job.model.name}, {si(job.model.parameter_count)} parameters"
    console.print(
        Text.assemble((f"fivefold {fivefold.__version__}", "bold"), f"  {model}  ", (f"-> {directory}", "dim"))
    )
    grid = Table.grid(padding=(0, 2))
    for section, table in msgspec.to_builtins(job).items():
        plain = {key: ",".join(map(str, value)) if isinstance(value, list) else value for key, value in table.items()}
        settings = " ".join(f"{key}={value}" for key, value in plain.items() if value is not None)
        grid.add_row(f"[bold]{section}[/]", Text(settings, style="dim"))
    console.print(grid)


def show_corpus(console: Console, sources: Sources) -> dict[str, float]:
    """The data, and the losses of guessing by frequency: what a model has to beat."""
    train, valid = sources.train, sources.valid
    held_out = f"{si(valid.tokens) if valid else 'none'} held out"
    size = f"  {si(train.tokens)} tokens in {train.documents} documents, {held_out}  "
    console.print(Text.assemble(("corpus", "bold"), size, (str(sources.path), "dim")))
    if train.tokens > _COUNTED:
        return {}
    known = entropy(train)
    marks = {"unigram": known.unigram} | ({"bigram": known.bigram} if known.bigram is not None else {})
    text = ", ".join(f"{name} entropy {value:.3f}" for name, value in marks.items())
    console.print(
        f"[bold]corpus[/]  {text} nats per token: what guessing by frequency, knowing 0 or 1 tokens, can reach"
    )
    return marks


def verdict(evaluation: Evaluation, marks: dict[str, float]) -> str:
    beaten = [f"{name} entropy {value:.4f}" for name, value in marks.items() if evaluation.held_out_loss < value]
    missed = [f"{name} entropy {value:.4f}" for name, value in marks.items() if evaluation.held_out_loss >= value]
    parts = ([f"below the {beaten[-1]}"] if beaten else []) + ([f"not yet below the {missed[0]}"] if missed else [])
    return ", ".join(parts) or f"over {evaluation.loss_tokens} tokens"
