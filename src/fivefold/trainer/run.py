"""Runs a job: finds its directory, joins the ranks, resumes, trains, and prints what a person reads."""

import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from rich.console import Console
from rich.text import Text

from fivefold.checkpoint.find import find, run_of, stored_job
from fivefold.checkpoint.hf_extras import copy_extras
from fivefold.checkpoint.manifest import Checkpoint
from fivefold.data.corpus import entropy
from fivefold.data.rows import Splits
from fivefold.job.config import Job
from fivefold.job.resume_rules import MEANT, Change, bends
from fivefold.launch import group, heartbeat, rank_log
from fivefold.launch import world as worlds
from fivefold.launch.device import (
    bind,
    check_bfloat16,
    check_memory,
    check_shared_gpu,
    choose_backend,
    choose_device,
    make_repeatable,
)
from fivefold.launch.exits import lost_peer
from fivefold.launch.group import tell_spares
from fivefold.launch.handshake import claim, ranks_text, short
from fivefold.launch.watchdog import BUILD_TIMEOUT, watch
from fivefold.machines.examine import before_step_1
from fivefold.model.compiler import compilation
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.same_collectives import same_order
from fivefold.render.blocks import render, width_of
from fivefold.render.paint import to_svg
from fivefold.schedules.text import save
from fivefold.support.errors import PeerLost, TrainingError, UserError
from fivefold.support.files import cannot_write, put
from fivefold.support.plugins import digests, options, plugin_error
from fivefold.support.text import graphs_text, plural, si
from fivefold.trainer.checkpointing import Checkpoints
from fivefold.trainer.directories import (
    JOB_FILE,
    enter_directory,
    lists_run,
    lock_directory,
    resumable_checkpoints,
    run_store,
)
from fivefold.trainer.loop import Stopped, Trainer
from fivefold.trainer.outputs import Display, Outputs, vanishing
from fivefold.trainer.records import Evaluation, Listener
from fivefold.trainer.restart_limit import count_start
from fivefold.trainer.restart_time import RestartTimer
from fivefold.trainer.result import LOAD_PICTURE, ExpertsResult
from fivefold.trainer.resuming import SCHEDULE_FILE, Start, differences
from fivefold.trainer.spikes import DECISIONS_FILE as DECISIONS
from fivefold.trainer.spikes import KnownDecisions, read_decisions
from fivefold.version import __version__

# ---- sharing --------------------------------------------------------------------------------------------------------
# Whether all nodes of a run see its directory, before the first step: all ranks write into its checkpoints.


_DIRECTORY_WAIT = 10.0  # seconds: a network file system may show a new directory late
_MAX_NAMED_NODES = 8  # nodes


def mark(directory: Path) -> Path:
    """By rank 0: a file that nobody else can have made."""
    path = directory / f".seen-{secrets.token_hex(16)}"
    try:
        put(path, path.name)
    except OSError as error:
        raise cannot_write(path, error) from None
    return path


def check_shared(marked: Path, control: Control) -> None:
    """Collective: all ranks look for rank 0's mark, which is then removed. If one does not see it, all end."""
    blind = "" if _sees(marked, time.monotonic() + _DIRECTORY_WAIT) else str(marked.parent.absolute())
    sights = control.gather_values((platform.node(), blind), tuple[str, str])
    problem = blind_nodes(sights)
    if control.rank == 0:
        with suppress(OSError):
            marked.unlink()
    if problem := control.broadcast_value(problem, str):
        raise UserError([problem] if blind or control.rank == 0 else [], "run.dir.shared")


def _sees(path: Path, deadline: float) -> bool:
    while True:
        with suppress(OSError):
            if path.read_text() == path.name:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def blind_nodes(sights: list[tuple[str, str]]) -> str:
    """What to say of the nodes that do not see it: of each rank, its node and where it looked in vain."""
    blind = sorted((host, where, rank) for rank, (host, where) in enumerate(sights) if where)
    if not blind:
        return ""
    nodes = [
        f"{short(host)} ({ranks_text([rank for _, _, rank in ranks])}) does not see it at {where}"
        for (host, where), ranks in groupby(blind, lambda row: row[:2])
    ]
    more = f"; {len(nodes) - _MAX_NAMED_NODES} more nodes do not" if len(nodes) > _MAX_NAMED_NODES else ""
    return (
        f"{short(sights[0][0])} (rank 0) has made the run's directory, and {'; '.join(nodes[:_MAX_NAMED_NODES])}{more}"
        ". All ranks write checkpoints into it: set run.dir to a directory of a file system that all nodes share, or "
        "checkpoint.url to object storage"
    )


# ---- run ------------------------------------------------------------------------------------------------------------


T = TypeVar("T")
_MAX_COUNTED_TOKENS = 1 << 26  # tokens up to which the corpus is counted before a run: about a second


def run_job(
    job: Job,
    sources: Splits,
    world: worlds.World,
    console: Console,
    start: Start,
    stopping: Callable[[], bool],
    listeners: Sequence[Listener] = (),
) -> Path:
    """Train, and return the run's directory. Rank 0 alone prints, and tells `listeners` of its steps. `stopping`:
    whether this rank was asked to stop and save."""
    try:
        with watch(job.train.timeout, world.rank, world.size):
            return _run_job(job, sources, world, console, start, stopping, listeners)
    except (Exception, SystemExit) as error:
        why = lost_peer(error) if world.size > 1 and isinstance(error, RuntimeError) else None
        if why is not None:
            raise PeerLost(f"rank {world.rank} lost its connection to another rank: {why}") from error
        if (of_plugin := plugin_error(error)) is not None:
            raise of_plugin from error
        if isinstance(error, SystemExit) and not error.code:  # it would end the process as if all steps were done
            raise TrainingError(f"{type(error).__name__}: {error.code} was raised before the last step") from error
        raise


def _run_job(
    job: Job,
    sources: Splits,
    world: worlds.World,
    console: Console,
    start: Start,
    stopping: Callable[[], bool],
    listeners: Sequence[Listener],
) -> Path:
    device = choose_device(job.train.device, world.local_rank)
    bind(device, world)
    check_memory(job, device, world)
    make_repeatable(job.train)
    proof = claim(job, sources.fingerprint, world) if world.joined else None
    apart = world.apart and world.size > 1
    backend = choose_backend(device, world.local_size, job.train, world.rank, apart)
    group.join(world, backend, job.train.timeout, proof)
    with ExitStack() as leaving:
        leaving.callback(group.leave, world)
        check_shared_gpu(job.train, device, world)
        run = _RankRun(job, sources, world, console, Mesh.of_job(job, device, job.train.timeout))
        run.enter_directory(start, leaving)
        run.make_trainer(leaving)
        run.resume()
        if not run.is_finished():
            run.train(stopping, listeners)
        return run.directory


class _RankRun:
    """One rank's part of a run, step by step, once the ranks have joined."""

    control: Control
    directory: Path
    again: bool  # a launcher starts the run again; known to rank 0 alone
    trainer: Trainer
    checkpointing: Checkpoints
    begun: Checkpoint | None = None  # from which it goes on
    restart_timer: RestartTimer | None = None

    def __init__(self, job: Job, sources: Splits, world: worlds.World, console: Console, mesh: Mesh):
        self.job, self.sources, self.world, self.console, self.mesh = job, sources, world, console, mesh
        self.slow = check_bfloat16(mesh.device, job.train.dtype)  # before the first product warns of it

    def note(self, sentence: str) -> None:
        self.console.print(Text.assemble(("note  ", "bold yellow"), sentence), soft_wrap=True)

    def enter_directory(self, start: Start, leaving: ExitStack) -> None:
        """Collective: rank 0 claims the run's directory, and all ranks see it."""
        job, world = self.job, self.world
        control = self.control = leaving.enter_context(closing(Control(self.mesh, job.train.timeout)))
        claimed, self.again = _on_rank_0(control, lambda: _begun(job, self.sources, start)) or (Path(), False)
        directory = self.directory = control.broadcast_value(claimed, Path)
        if world.apart and job.checkpoint.save and not job.checkpoint.url:
            marked = control.broadcast_value(_on_rank_0(control, lambda: mark(directory)) or Path(), Path)
            check_shared(marked, control)
        if world.joined:
            rank_log.capture(directory / "logs", world)
        if world.rank == 0:  # whose job is the one that is written
            self.job = _with_its_schedule(job, directory)

    def make_trainer(self, leaving: ExitStack) -> None:
        """The model on its ranks, with its checkpoints and watchers; then what a person reads before the first step."""
        job, mesh, control = self.job, self.mesh, self.control
        heartbeat.enter("the making of the model", least=BUILD_TIMEOUT)
        trainer = self.trainer = Trainer(job, self.sources, mesh)
        same_order(control, mesh, trainer.engine.communication_order)
        trainer.guard.watch(leaving.enter_context(closing(Control(mesh, job.train.timeout))), self.note)
        self.checkpointing = Checkpoints(run_store(job, self.directory), control, trainer, self.note)
        leaving.callback(self.checkpointing.close)
        if self.world.rank == 0:
            show_job(self.console, job, mesh)
        for sentence in before_step_1(job, mesh, control):
            self.note(sentence)

    def resume(self) -> None:
        """Load what there is, and say from where, and what differs from the run so far."""
        trainer, console, world, note = self.trainer, self.console, self.world, self.note
        self.restart_timer = _time_restart(self.directory, world, note) if self.again else None
        decided = _on_rank_0(self.control, lambda: _earlier_decisions(self.directory, note)) or KnownDecisions()
        trainer.policy.say = note
        trainer.policy.learn(self.control.broadcast_value(decided, KnownDecisions))
        trainer.policy.directory = self.directory if world.rank == 0 else None
        self.begun = self.checkpointing.restore()
        if self.restart_timer is not None:
            self.restart_timer.end_load(trainer.done, world.size, str(self.job.layout))
        if self.checkpointing.initial_weights:
            console.print(f"[bold]starts[/] with the weights of {self.checkpointing.initial_weights}", soft_wrap=True)
        if self.begun is not None:
            loaded = f"{self.checkpointing.resumed_from}; loaded in {self.checkpointing.restore_seconds:.2f} s"
            console.print(f"[bold]resumes[/] from {loaded}", soft_wrap=True)
            changed = differences(self.begun, self.job, self.sources)
            show_changes(console, changed)
            if any(change.key.startswith("watch.") and change.rule == MEANT for change in changed):
                trainer.policy.judged = 0  # other rules were asked for

    def is_finished(self) -> bool:
        """Whether no step is left; says so, and how to go on."""
        if self.trainer.done < self.job.train.steps:
            return False
        before = stored_job(self.begun) if self.begun else self.job
        self.console.print(finished_sentence(self.directory, before, self.trainer.done), soft_wrap=True, markup=False)
        if self.world.rank == 0:
            tell_spares()
        return True

    def train(self, stopping: Callable[[], bool], listeners: Sequence[Listener]) -> None:
        """All steps that are left; rank 0 writes and shows them, and tells `listeners`."""
        job, trainer, console = self.job, self.trainer, self.console
        facts = environment(self.mesh, self.sources, trainer.done)
        outputs = _on_rank_0(self.control, lambda: Outputs(self.directory, job, facts, trainer.done, self.note))
        trainer.stopping = lambda: stopping() or (outputs is not None and outputs.vanished())
        if outputs is None:
            self._steps([])
            return
        self.checkpointing.on_saved = outputs.on_checkpoint
        say(console, "run", f"{self.directory}; every setting: {self.directory / JOB_FILE}")
        marks = show_corpus(console, self.sources)
        if self.slow:
            self.note(self.slow)
        display = Display(console, job.train.steps, marks, job.train.log_every, outputs.earlier)
        begin = time.monotonic()
        restart_timer = [self.restart_timer] if self.restart_timer else []
        evaluation = self._steps([outputs, display, *restart_timer, *listeners], outputs)
        tell_spares()
        seconds = time.monotonic() - begin
        _show_rest(console, outputs, trainer, job, self.directory)
        self._show_end(display, seconds, evaluation, marks)  # last: it is what a screen still shows
        outputs.check()

    def _steps(self, listeners: list[Listener], outputs: Outputs | None = None) -> Evaluation | None:
        """A run whose directory vanishes stops as if asked to, and all ranks know why."""
        try:
            return self.trainer.run(listeners, outputs.trace if outputs else None, self.checkpointing)
        except Stopped as stopped:
            if self.control.broadcast_value(outputs is not None and outputs.gone, bool):
                raise vanishing(self.directory) from None
            raise Stopped(stopped.step, self.directory) from None
        finally:
            for listener in listeners:
                listener.close()

    def _show_end(
        self, display: Display, seconds: float, evaluation: Evaluation | None, marks: dict[str, float]
    ) -> None:
        console = self.console
        console.print(f"[bold]watchers[/]  {self.trainer.account}", soft_wrap=True)
        for row in display.curve():
            console.print(row, soft_wrap=True)
        steps = f"{display.new_steps} steps in {seconds:.1f} s"
        console.print(f"{steps}; job, metrics and environment in {self.directory}", markup=False)
        if evaluation is not None:
            loss = f"[bold]held-out loss {evaluation.held_out_loss:.4f}[/]"
            console.print(f"{loss} nats per token, {verdict(evaluation, marks)}")


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
        outputs.keep(directory / LOAD_PICTURE, lambda: put(directory / LOAD_PICTURE, to_svg(load.scene())))
        render(load.blocks(), console, width_of(console))


def _time_restart(directory: Path, world: worlds.World, say: Callable[[str], None]) -> RestartTimer | None:
    """The timer of a run that a launcher has restarted, on rank 0, as the load begins."""
    replan = float(os.environ.get(worlds.PLANNED_ENV, 0))
    replanned_here = world.apart or not world.meeting.file  # else the launcher of this machine has chosen the layout
    timer = RestartTimer.of_run(directory, replan, replanned_here=replanned_here, say=say)
    if timer is not None:
        timer.start_load()
    return timer


def _on_rank_0(control: Control, do: Callable[[], T]) -> T | None:
    """What rank 0 got by doing it. If it cannot, all ranks end alike, and rank 0 says why."""
    done, problems = None, []
    if control.rank == 0:
        try:
            done = do()
        except UserError as error:
            problems = error.coded
    if control.broadcast_value(bool(problems), bool):
        raise UserError(problems)
    return done


def _begun(job: Job, sources: Splits, start: Start) -> tuple[Path, bool]:
    """The run's directory, claimed, and whether a launcher starts the run again. A schedule from a file is kept in it,
    so that the run resumes without the file."""
    chosen = start.checked(job, sources)
    again = worlds.starts_before() > 0 or (
        worlds.PLANNED_ENV in os.environ and chosen is not None and lists_run(job, chosen)
    )
    directory = enter_directory(job, chosen)
    lock_directory(directory)
    if job.run.weights and not resumable_checkpoints(job, directory):
        try:
            copy_extras(run_of(find(job.run.weights)), directory)
        except OSError as error:
            raise cannot_write(directory, error) from None
    count_start(directory, again=again, steps=job.train.steps)
    if schedule := job.layout.record.schedule:
        save(schedule, directory / SCHEDULE_FILE)
    return directory, again


def _earlier_decisions(directory: Path, note: Callable[[str], None]) -> KnownDecisions:
    """What earlier starts have decided about steps."""
    try:
        decisions = read_decisions(directory)
    except OSError as error:
        raise cannot_write(Path(error.filename or directory), error) from None
    if decisions.damaged:
        note(f"{directory / DECISIONS}: {plural(decisions.damaged, 'line')}, damaged or half written, left out")
    return decisions


def _with_its_schedule(job: Job, directory: Path) -> Job:
    """The job with the schedule that was kept."""
    if job.layout.record.schedule is None:
        return job
    kept = str((directory / SCHEDULE_FILE).absolute())
    return msgspec.structs.replace(job, layout=msgspec.structs.replace(job.layout, schedule=kept))


def environment(mesh: Mesh, sources: Splits, done: int) -> dict[str, object]:
    """What a run was made with, kept next to its metrics."""
    device = mesh.device
    return {
        "fivefold": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x {torch.get_num_threads()}",
        "ranks": mesh.world.size,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "data": sources.where,
        "tokens": sources.fingerprint,
        "resumed_after": done,
        "plugins": digests(),
    }


def show_job(console: Console, job: Job, mesh: Mesh) -> None:
    """What trains, how long and where. The resolved job is in the run's directory, and `--check` prints it."""
    model, train, optimizer = job.model, job.train, job.optimizer
    size = f"{si(model.parameter_count)} parameters"
    if model.experts is not None:
        size += f", {si(model.active_parameters)} active"
    lines = {
        f"fivefold {__version__}": f"{model.name}, {size}",
        "train": f"{plural(train.steps, 'step')} of {plural(train.batch, 'sequence')} of {job.data.seq} tokens; "
        f"{optimizer.name}, lr {optimizer.lr:g}, {optimizer.schedule}",
        "layout": f"{job.layout}: {plural(mesh.world.size, 'rank')} on {_device(mesh)}, {train.dtype}",
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


def finished_sentence(directory: Path, job: Job, done: int) -> str:
    """A sentence for a run that has nothing left to do, with what goes on with its job and keeps its learning rates."""
    steps = done + job.train.steps
    longer = msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, steps=steps))
    keeps = f" optimizer.schedule_steps={job.train.steps}" if bends(job, longer, done) else ""
    return (
        f"all {done} steps of {directory} are done; --fresh starts over in a directory of its own, and "
        f"'fivefold train {directory} train.steps={steps}{keeps}{options(job.plugins)}' continues it"
    )


def show_corpus(console: Console, sources: Splits) -> dict[str, float]:
    """The data, and the losses of guessing by frequency: what a model has to beat."""
    train, valid = sources.train, sources.valid
    held_out = f"{si(valid.tokens) if valid else 'none'} held out"
    documents = "" if train.documents is None else f" in {train.documents} documents"
    size = f"  {si(train.tokens)} tokens{documents}, {held_out}  "
    console.print(Text.assemble(("corpus", "bold"), size, (sources.where, "dim")))
    if train.tokens > _MAX_COUNTED_TOKENS:
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
