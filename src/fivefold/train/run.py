"""A run from its job to its result: the directory, the listeners, the loop, and the words around it."""

import json
import platform
import time
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import fivefold
from fivefold.data.entropy import entropy
from fivefold.errors import PeerLost, UserError
from fivefold.parallel.lost import reason
from fivefold.parallel.mesh import Mesh, backend
from fivefold.trace.report import TraceFile
from fivefold.train import world as worlds
from fivefold.train.config import Job, to_toml
from fivefold.train.device import check_bfloat16, check_memory, choose_device, make_repeatable
from fivefold.train.display import Display
from fivefold.train.listeners import Listener, MetricsFile, TensorBoard
from fivefold.train.loop import Trainer
from fivefold.train.preflight import Sources
from fivefold.train.records import Evaluation
from fivefold.words import si

_COUNTED = 1 << 26  # tokens up to which the corpus is counted before a run: about a second


def run_job(job: Job, sources: Sources, world: worlds.World, console: Console) -> Path | None:
    """Train; the path of the run's directory on rank 0, which alone speaks and writes."""
    try:
        return _run_job(job, sources, world, console)
    except RuntimeError as error:
        why = reason(error) if world.size > 1 else None
        if why is None:
            raise
        raise PeerLost(f"rank {world.rank} lost its connection to another rank: {why}") from error


def _run_job(job: Job, sources: Sources, world: worlds.World, console: Console) -> Path | None:
    device = choose_device(job.train.device, world.local_rank)
    check_memory(job, device, world)
    make_repeatable(job.train)
    slow = check_bfloat16(device, job.train.dtype)
    worlds.join(world, backend(device, world.local_size), job.train.timeout)
    try:
        mesh = Mesh.of(job.layout, device, job.train.timeout)
        if world.rank > 0:
            Trainer(job, sources, mesh).run([])
            return None
        directory = make_directory(Path(job.run.dir).expanduser(), job.run.name)
        (directory / "job.toml").write_text(to_toml(job))
        (directory / "environment.json").write_text(json.dumps(environment(mesh, sources), indent=2) + "\n")
        show_job(console, job, directory)
        marks = show_corpus(console, sources)
        if slow:
            console.print(f"[bold yellow]note[/]  {slow}", soft_wrap=True)
        trainer = Trainer(job, sources, mesh)
        display = Display(console, job.train.steps, marks, job.train.log_every)
        listeners: list[Listener] = [MetricsFile(directory / "metrics.jsonl"), display]
        if job.run.tensorboard:
            listeners.append(TensorBoard(directory / "tensorboard"))
        traced = TraceFile(directory / "trace.json")
        start = time.monotonic()
        try:
            evaluation = trainer.run(listeners, traced)
        finally:
            for listener in listeners:
                listener.close()
        show_end(console, display, evaluation, time.monotonic() - start, directory)
        traced.show(console)
        return directory
    finally:
        worlds.leave(world)


def make_directory(parent: Path, name: str) -> Path:
    """A new directory NAME, or NAME-2, NAME-3 ...: what an earlier run left is never touched."""
    number = 1
    while True:
        directory = parent / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"cannot make the run's directory {directory}: {error.strerror}") from None


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
        settings = " ".join(f"{key}={_plain(value)}" for key, value in table.items() if value is not None)
        grid.add_row(f"[bold]{section}[/]", Text(settings, style="dim"))
    console.print(grid)


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


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


def show_end(
    console: Console, display: Display, evaluation: Evaluation | None, seconds: float, directory: Path
) -> None:
    for row in display.curve():
        console.print(row, soft_wrap=True)
    console.print(
        f"{len(display.losses)} steps in {seconds:.1f} s; job, metrics and environment in {directory}", markup=False
    )
    if evaluation is None:
        return
    console.print(
        f"[bold]held-out loss {evaluation.held_out_loss:.4f}[/] nats per token, {verdict(evaluation, display.marks)}"
    )


def verdict(evaluation: Evaluation, marks: dict[str, float]) -> str:
    beaten = [f"{name} entropy {value:.4f}" for name, value in marks.items() if evaluation.held_out_loss < value]
    missed = [f"{name} entropy {value:.4f}" for name, value in marks.items() if evaluation.held_out_loss >= value]
    parts = ([f"below the {beaten[-1]}"] if beaten else []) + ([f"not yet below the {missed[0]}"] if missed else [])
    return ", ".join(parts) or f"over {evaluation.loss_tokens} tokens"
