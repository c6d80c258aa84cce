"""Runs a job: finds its directory, joins the ranks, resumes, trains, and prints what a person reads."""

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from rich.console import Console
from rich.text import Text

import fivefold
from fivefold.checkpoint.carried import carry
from fivefold.checkpoint.find import find, run_of
from fivefold.checkpoint.job import stored
from fivefold.data.entropy import entropy
from fivefold.data.index import NAME as INDEX
from fivefold.doctor.before import before_step_1
from fivefold.job.config import Job
from fivefold.job.continuing import MEANT, Change, bends
from fivefold.job.preflight import Sources
from fivefold.launch import heartbeat, logs
from fivefold.launch import world as worlds
from fivefold.launch.device import check_bfloat16, check_memory, choose_backend, choose_device, make_repeatable
from fivefold.launch.ends import lost_peer
from fivefold.launch.numa import bind
from fivefold.launch.spare import tell_spares
from fivefold.launch.statement import claim
from fivefold.model.compiled import compilation
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.same_calls import same_order
from fivefold.report.paint import to_svg
from fivefold.report.terminal import render, width_of
from fivefold.schedule.text import save
from fivefold.support.errors import PeerLost, UserError
from fivefold.support.files import cannot_write, put
from fivefold.support.formatting import counted, graphs_text, si
from fivefold.train.checkpointing import Checkpoints
from fivefold.train.directories import JOB, complete, entered, store, trained
from fivefold.train.directories import claim as claim_directory
from fivefold.train.display import Display
from fivefold.train.experts import PICTURE, ExpertsResult
from fivefold.train.loop import Stopped, Trainer
from fivefold.train.outputs import Outputs, vanishing
from fivefold.train.progress import begin
from fivefold.train.records import Evaluation, Listener
from fivefold.train.recovery import Recovery
from fivefold.train.resuming import SCHEDULE, Start, differences
from fivefold.train.sharing import check_shared, mark
from fivefold.train.watch.decisions import NAME as DECISIONS
from fivefold.train.watch.decisions import Known, known

T = TypeVar("T")
_COUNTED = 1 << 26  # tokens up to which the corpus is counted before a run: about a second


def run_job(
    job: Job, sources: Sources, world: worlds.World, console: Console, start: Start, stopping: Callable[[], bool]
) -> None:
    """Train. Rank 0 alone prints. `stopping`: whether this rank was asked to stop and save."""
    try:
        with heartbeat.watched(job.train.timeout, world.rank, world.size):
            _run_job(job, sources, world, console, start, stopping)
    except RuntimeError as error:
        why = lost_peer(error) if world.size > 1 else None
        if why is None:
            raise
        raise PeerLost(f"rank {world.rank} lost its connection to another rank: {why}") from error


def _run_job(
    job: Job, sources: Sources, world: worlds.World, console: Console, start: Start, stopping: Callable[[], bool]
) -> None:
    device = choose_device(job.train.device, world.local_rank)
    bind(device, world)
    check_memory(job, device, world)
    make_repeatable(job.train)
    slow = check_bfloat16(device, job.train.dtype)
    proof = claim(job, sources.path / INDEX, world) if world.joined else None
    backend = choose_backend(device, world.local_size, job.train, world.rank, world.apart)
    worlds.join(world, backend, job.train.timeout, proof)

    def note(sentence: str) -> None:
        console.print(Text.assemble(("note  ", "bold yellow"), sentence), soft_wrap=True)

    with ExitStack() as leaving:
        leaving.callback(worlds.leave, world)
        mesh = Mesh.of(job.layout, device, job.train.timeout, spec=job.model)
        control = leaving.enter_context(closing(Control(mesh, job.train.timeout)))
        directory, again = _agreed(control, lambda: _begun(job, sources, start)) or (Path(), False)
        directory = control.from_first(directory, Path)
        if world.apart and job.checkpoint.save and not job.checkpoint.url:
            marked = control.from_first(_agreed(control, lambda: mark(directory)) or Path(), Path)
            check_shared(marked, control)
        if world.joined:
            logs.keep(directory / "logs", world)
        if world.rank == 0:  # whose job is the one that is written
            job = _with_its_schedule(job, directory)
        heartbeat.enter("the making of the model", least=heartbeat.LONG)
        trainer = Trainer(job, sources, mesh)
        same_order(control, mesh, trainer.engine.order)
        trainer.guard.watch(leaving.enter_context(closing(Control(mesh, job.train.timeout))), note)
        checkpointing = Checkpoints(store(job, directory), control, trainer, note)
        leaving.callback(checkpointing.close)
        if world.rank == 0:
            show_job(console, job, mesh)
        for sentence in before_step_1(job, mesh, control):
            note(sentence)
        recovery = _recovery(directory, world, note) if again else None
        trainer.policy.say = note
        trainer.policy.learn(control.from_first(_agreed(control, lambda: _decided(directory, note)) or Known(), Known))
        trainer.policy.directory = directory if world.rank == 0 else None
        begun = checkpointing.restore()
        if recovery is not None:
            recovery.loaded(trainer.done, world.size, str(job.layout))
        if checkpointing.weights:
            console.print(f"[bold]starts[/] with the weights of {checkpointing.weights}", soft_wrap=True)
        if begun is not None:
            loaded = f"{checkpointing.began}; loaded in {checkpointing.seconds:.2f} s"
            console.print(f"[bold]resumes[/] from {loaded}", soft_wrap=True)
            changed = differences(begun, job, sources)
            show_changes(console, changed)
            if any(one.key.startswith("watch.") and one.rule == MEANT for one in changed):
                trainer.policy.judged = 0  # other rules were asked for
        if trainer.done >= job.train.steps:
            before = stored(begun) if begun else job
            console.print(finished(directory, before, trainer.done), soft_wrap=True, markup=False)
            if world.rank == 0:
                tell_spares()
            return
        facts = environment(mesh, sources)
        outputs = _agreed(control, lambda: Outputs(directory, job, facts, trainer.done, note))
        trainer.stopping = lambda: stopping() or (outputs is not None and outputs.vanished())
        if outputs is None:
            _train(trainer, control, directory, checkpointing, [])
            return
        say(console, "run", f"{directory}; every setting: {directory / JOB}")
        marks = show_corpus(console, sources)
        if slow:
            note(slow)
        display = Display(console, job.train.steps, marks, job.train.log_every, outputs.earlier)
        begin = time.monotonic()
        listeners: list[Listener] = [one for one in (outputs, display, recovery) if one]
        evaluation = _train(trainer, control, directory, checkpointing, listeners, outputs)
        tell_spares()
        steps = f"{display.steps_here} steps in {time.monotonic() - begin:.1f} s"
        for row in display.curve():
            console.print(row, soft_wrap=True)
        console.print(f"{steps}; job, metrics and environment in {directory}", markup=False)
        if evaluation is not None:
            loss = f"[bold]held-out loss {evaluation.held_out_loss:.4f}[/]"
            console.print(f"{loss} nats per token, {verdict(evaluation, marks)}")
        console.print(f"[bold]watchers[/]  {trainer.account}", soft_wrap=True)
        _show_rest(console, outputs, trainer, job, directory)
        outputs.judge()


def _show_rest(console: Console, outputs: Outputs, trainer: Trainer, job: Job, directory: Path) -> None:
    """What only some runs have: experts, a trace, compiled blocks, counts."""
    if job.model.experts is not None:
        _show_load(console, outputs, job, directory)
    outputs.traced.show(console)
    if trainer.engine.compiled:
        console.print(graphs_text(*compilation(), blocks=job.layout.compiles_blocks), soft_wrap=True)
    if job.train.count:
        render(trainer.counted.blocks(), console, width_of(console))
        counts = directory / "counts.json"
        outputs.keep(counts, lambda: put(counts, json.dumps(trainer.counted.to_dict(), indent=2) + "\n"))


def _show_load(console: Console, outputs: Outputs, job: Job, directory: Path) -> None:
    """The load of the experts, and its picture."""
    with suppress(UserError):  # the metrics were lost, and that has been said
        load = ExpertsResult.read(directory, job.model)
        outputs.keep(directory / PICTURE, lambda: put(directory / PICTURE, to_svg(load.scene())))
        render(load.blocks(), console, width_of(console))


def _recovery(directory: Path, world: worlds.World, say: Callable[[str], None]) -> Recovery | None:
    """Of rank 0 of a run that a launcher has started again."""
    planned = float(os.environ.get(worlds.PLANNED, 0))
    recovery = Recovery.seen(directory, planned, world.apart or not world.meeting.file, say)
    if recovery is not None:
        recovery.loads()
    return recovery


def _agreed(control: Control, do: Callable[[], T]) -> T | None:
    """What rank 0 got by doing it. If it cannot, all ranks end alike, and rank 0 says why."""
    done, problems = None, []
    if control.rank == 0:
        try:
            done = do()
        except UserError as error:
            problems = error.problems
    if control.from_first(bool(problems), bool):
        raise UserError(problems)
    return done


def _begun(job: Job, sources: Sources, start: Start) -> tuple[Path, bool]:
    """The run's directory, claimed, and whether a launcher starts the run again. A schedule from a file is kept in it,
    so that the run resumes without the file."""
    found = start.checked(job, sources)
    again = worlds.starts_before() > 0 or (worlds.PLANNED in os.environ and found is not None and trained(job, found))
    directory = entered(job, found)
    claim_directory(directory)
    if job.run.weights and not complete(job, directory):
        try:
            carry(run_of(find(job.run.weights)), directory)
        except OSError as error:
            raise cannot_write(directory, error) from None
    begin(directory, again, job.train.steps)
    if schedule := job.layout.record.schedule:
        save(schedule, directory / SCHEDULE)
    return directory, again


def _decided(directory: Path, note: Callable[[str], None]) -> Known:
    """What earlier starts have decided about steps."""
    try:
        found = known(directory)
    except OSError as error:
        raise cannot_write(Path(error.filename or directory), error) from None
    if found.damaged:
        note(f"{directory / DECISIONS}: {counted(found.damaged, 'line')}, damaged or half written, left out")
    return found


def _with_its_schedule(job: Job, directory: Path) -> Job:
    """The job with the schedule that was kept."""
    if job.layout.record.schedule is None:
        return job
    kept = str((directory / SCHEDULE).absolute())
    return msgspec.structs.replace(job, layout=msgspec.structs.replace(job.layout, schedule=kept))


def _train(
    trainer: Trainer,
    control: Control,
    directory: Path,
    checkpointing: Checkpoints,
    listeners: list[Listener],
    outputs: Outputs | None = None,
) -> Evaluation | None:
    """All steps that are left. A run whose directory vanishes stops as if asked to, and all ranks know why."""
    try:
        return trainer.run(listeners, outputs.trace if outputs else None, checkpointing)
    except Stopped as stopped:
        if control.from_first(outputs is not None and outputs.gone, bool):
            raise vanishing(directory) from None
        raise Stopped(stopped.step, directory) from None
    finally:
        for listener in listeners:
            listener.close()


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


def show_job(console: Console, job: Job, mesh: Mesh) -> None:
    """What trains, how long and where. The resolved job is in the run's directory, and `--check` prints it."""
    model, train, optimizer = job.model, job.train, job.optimizer
    size = f"{si(model.parameter_count)} parameters"
    if model.experts is not None:
        size += f", {si(model.active_parameters)} active"
    lines = {
        f"fivefold {fivefold.__version__}": f"{model.name}, {size}",
        "train": f"{counted(train.steps, 'step')} of {counted(train.batch, 'sequence')} of {job.data.seq} tokens; "
        f"{optimizer.name}, lr {optimizer.lr:g}, {optimizer.schedule}",
        "layout": f"{job.layout}: {counted(mesh.world.size, 'rank')} on {_device(mesh)}, {train.dtype}",
    }
    for name, text in lines.items():
        say(console, name, text)


def say(console: Console, what: str, text: str) -> None:
    console.print(Text.assemble((f"{what:6}", "bold"), f"  {text}"), soft_wrap=True)


def _device(mesh: Mesh) -> str:
    return torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"


def show_changes(console: Console, changes: list[Change]) -> None:
    """What differs from the run so far."""
    for change in changes:
        console.print(Text.assemble(("changed", "bold"), f"  {change}"), soft_wrap=True)


def finished(directory: Path, job: Job, done: int) -> str:
    """A sentence for a run that has nothing left to do, with what goes on with its job and keeps its learning rates."""
    steps = done + job.train.steps
    longer = msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, steps=steps))
    keeps = f" optimizer.schedule_steps={job.train.steps}" if bends(job, longer, done) else ""
    return (
        f"all {done} steps of {directory} are done; --fresh starts over in a directory of its own, and "
        f"'fivefold train {directory} train.steps={steps}{keeps}' continues it"
    )


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
