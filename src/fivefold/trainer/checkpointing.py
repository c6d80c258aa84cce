"""A trainer's checkpoints: which one it resumes from, and when it saves, on disk and in memory."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from fivefold.checkpoint.find import find
from fivefold.checkpoint.load import Say, damage, load, newest, set_aside
from fivefold.checkpoint.manifest import Checkpoint, Damaged, Manifest
from fivefold.checkpoint.memory_load import MemoryCheckpointer
from fivefold.checkpoint.memory_snapshots import Candidate, RunStart, is_abandoned, read_starts, record_start
from fivefold.checkpoint.retention import delete_later_than
from fivefold.checkpoint.save import Saver
from fivefold.checkpoint.shards import Shard, saveable_tensors, shards_to_write, stored_buffers
from fivefold.checkpoint.store import Store
from fivefold.parallel.control import Control
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.storage_place import Place, place_of
from fivefold.trainer.loop import Trainer
from fivefold.trainer.resuming import misfits

_REPORTED_WAIT = 1.0  # seconds; a longer wait for the disk is reported


def _find_weights(named: str, rank: int) -> tuple[str, list[str]]:
    """(path of the weights that a job names, problems), on rank 0; ("", []) on others."""
    try:
        return (str(find(named).path) if rank == 0 else ""), []
    except UserError as error:
        return "", error.problems


class Checkpoints:
    """Saves and restores the trainer's state.

    After a failed save the run goes on, and the next one that is due tries again; if the last one fails, so does the
    run. `say` prints a note.
    """

    def __init__(self, store: Store, control: Control, trainer: Trainer, say: Say):
        self.store, self.control, self.trainer, self.say = store, control, trainer, say
        self.saver = Saver(store, control, trainer.job.checkpoint, trainer.mesh.device)
        self.shapes = {parameter.name: parameter.shape for parameter in trainer.job.model.parameters()}
        self.data = trainer.sources.fingerprint
        self.saved = 0  # the last step that was loaded, or whose save was begun
        self.wait_reported = False  # that steps wait for the disk: reported once
        self.memory = MemoryCheckpointer(control, say)
        self.starts: list[RunStart] = []  # earlier starts of the run
        self.resumed_from = ""  # a text: the checkpoint that was loaded
        self.initial_weights = ""  # a text: the checkpoint of another run whose weights this one began with
        self.restore_start = 0.0  # time.monotonic()
        self.restore_seconds = 0.0
        self.read_seconds = 0.0  # of those, until masters and states were in place
        self.on_saved: Callable[[int], None] = lambda step: None  # called with the step of each complete checkpoint

    def restore(self) -> Checkpoint | None:
        """Loads the newest undamaged checkpoint, in memory or on disk, if there is one. Collective."""
        self.restore_start = time.monotonic()
        run = self.store.directory.parent
        self.memory.enter(self.trainer.mesh, run, enabled=bool(self.trainer.job.checkpoint.memory_every))
        self.starts = self._starts(run) if self.control.rank == 0 and self.memory.nodes is not None else []
        candidates = self.memory.find(self._is_current)
        disk_step: int | None = self.control.broadcast_value(self._step_on_disk() if candidates else None, int | None)
        newer = [candidate for candidate in candidates if candidate.step >= (disk_step or 0)]
        older = [candidate for candidate in candidates if candidate.step < (disk_step or 0)]
        checkpoint = self._from_memory(newer, disk_step) or self._from_disk(older, disk_step)
        if checkpoint is None and self.trainer.job.run.weights:
            self._load_initial_weights(self.trainer.job.run.weights)
        if self.control.rank == 0 and self.memory.nodes is not None:
            record_start(run, self.starts, self.memory.nodes.start, checkpoint.manifest.step if checkpoint else 0)
        self.restore_seconds = time.monotonic() - self.restore_start
        return checkpoint

    def _starts(self, run: Place) -> list[RunStart]:
        """Earlier starts of the run. Where they cannot be read, none of the snapshots in memory counts as current."""
        try:
            return read_starts(run)
        except Damaged as error:
            self.say(f"{error}; snapshots in memory are left alone, and the newest checkpoint on disk is taken")
            assert self.memory.nodes is not None
            return [RunStart(self.memory.nodes.start, -1)]

    def _from_memory(self, candidates: list[Candidate], disk_step: int | None) -> Checkpoint | None:
        loaded = self.memory.load(candidates, self._shards_to_load)
        if loaded is None:
            return None
        candidate, checkpoint = loaded
        on_disk = "disk has none" if disk_step is None else f"disk has step {disk_step}"
        details = "; ".join(filter(None, (candidate.availability, on_disk)))
        self.resumed_from = f"memory, after step {candidate.step} ({details})"
        self._restore_progress(checkpoint)
        return checkpoint

    def _from_disk(self, older: list[Candidate], disk_step: int | None) -> Checkpoint | None:
        """`older`: snapshots in memory of steps before `disk_step`, which count if the checkpoint of it is damaged."""
        checkpoint, refusal = None, None
        try:
            checkpoint = newest(self.store, self.control, self.say, self._not_undone)
        except UserError as error:
            refusal = error
        last = checkpoint.manifest.step if checkpoint else -1
        in_memory = self._from_memory([candidate for candidate in older if candidate.step > last], disk_step)
        if in_memory is not None:
            return in_memory
        if refusal:
            raise refusal
        if checkpoint is not None:
            self.resumed_from = f"{checkpoint.path}, after step {checkpoint.manifest.step}"
            self._load(checkpoint)
        return checkpoint

    def _load_initial_weights(self, named: str) -> None:
        """Loads the weights of another run, and nothing else of it: this run is at its first step."""
        path, problems = self.control.broadcast_value(_find_weights(named, self.control.rank), tuple[str, list[str]])
        engine, weights = self.trainer.engine, Checkpoint(place_of(path)) if path else None
        if weights is None or (problems := damage(weights, self.control) or misfits(weights, self.trainer.job)):
            raise UserError(problems if self.control.rank == 0 else [], "run.weights.refused")
        load(weights, saveable_tensors(engine.weights, self.shapes, None, stored_buffers(engine.buffers, weights)))
        engine.optimizer.restore(0)
        self.initial_weights = f"{weights.path}, after step {weights.manifest.step}"

    def _step_on_disk(self, last: float = math.inf) -> int | None:
        """The step of the newest checkpoint on disk up to step `last`, by its name; its files are not checked."""
        with suppress(OSError):
            earlier = (checkpoint for checkpoint in self.store.complete() if checkpoint.step <= last)
            return next((checkpoint.step for checkpoint in earlier if self._not_undone(checkpoint)), None)
        return None

    def _not_undone(self, checkpoint: Checkpoint) -> bool:
        """Whether no rollback has undone the checkpoint. True if it cannot be read: its load then raises the error."""
        with suppress(UserError):
            return not self.trainer.policy.decisions.undone(checkpoint.manifest.samples)
        return True

    def _is_current(self, candidate: Candidate) -> bool:
        """On rank 0: whether neither a rollback nor a later start has undone the steps of a snapshot."""
        undone = self.trainer.policy.decisions.undone(candidate.samples)
        return not (undone or is_abandoned(candidate.name, candidate.step, self.starts))

    def _shards_to_load(self, checkpoint: Checkpoint) -> dict[str, Shard]:
        """The tensors of this rank that a checkpoint has, which must be of the job's model."""
        engine, job = self.trainer.engine, self.trainer.job
        if problems := misfits(checkpoint, job):
            raise UserError(problems if self.control.rank == 0 else [])  # all ranks have them, and rank 0 prints them
        same = checkpoint.manifest.states_of == job.optimizer.name  # another optimizer's states are of no use
        buffers = stored_buffers(engine.buffers, checkpoint)
        return saveable_tensors(engine.weights, self.shapes, engine.optimizer if same else None, buffers)

    def _load(self, checkpoint: Checkpoint) -> None:
        """Loads the trainer's state from a checkpoint, in memory or on disk."""
        shards = self._shards_to_load(checkpoint)
        if not self.memory.load_checked(checkpoint, shards):
            load(checkpoint, shards)
            self.saved = checkpoint.manifest.step
        self._restore_progress(checkpoint)

    def _restore_progress(self, checkpoint: Checkpoint) -> None:
        """Sets everything but tensors as the checkpoint has it: steps, samples, updates, the spike watcher's state."""
        self.read_seconds, manifest = time.monotonic() - self.restore_start, checkpoint.manifest
        self.trainer.engine.optimizer.restore(manifest.updates)
        self.trainer.policy.restore(manifest.watched, checkpoint.path)
        self.trainer.done, self.trainer.samples = manifest.step, manifest.samples

    def newest_until(self, step: int) -> Checkpoint | None:
        """The newest undamaged checkpoint of a step up to this one, if there is any. Collective."""
        self.finish()
        self.memory.finish()
        candidates = self.memory.find(lambda candidate: candidate.step <= step and self._is_current(candidate))
        disk_step = self.control.broadcast_value(self._step_on_disk(step) if candidates else None, int | None)
        newer = [candidate for candidate in candidates if candidate.step >= (disk_step or 0)]
        if checkpoint := self.memory.first_undamaged(newer):
            return checkpoint

        def usable(checkpoint: Checkpoint) -> bool:
            return checkpoint.step <= step and self._not_undone(checkpoint)

        return newest(self.store, self.control, self.say, usable)

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Rolls the trainer back to a checkpoint, and deletes the checkpoints of later steps. Collective."""
        self._load(checkpoint)
        self.saved = min(self.saved, checkpoint.step)  # steps that come again are saved again
        self.control.all_gather_values(True, bool)  # a barrier: all ranks have read it
        self.memory.forget(after=checkpoint.step)
        if self.control.rank == 0:
            try:
                delete_later_than(self.store, checkpoint.step)
            except OSError as error:
                self.say(f"checkpoints after step {checkpoint.step} cannot be deleted: {error.strerror}")

    def prepare(self) -> None:
        """Allocates what the first save needs, before the first step."""
        config = self.trainer.job.checkpoint
        if config.save and config.every:
            self.saver.staging.prepare(self.shards())

    def after(self, step: int, last: bool) -> None:
        """Saves after a step what is due; after the `last` step of this start always, and waits for it."""
        config = self.trainer.job.checkpoint
        if self.saver.ended:
            self.finish()
        if config.memory_every and step % config.memory_every == 0 and not last:
            self.save_to_memory(step)
        if config.save and step != self.saved and (last or (config.every and step % config.every == 0)):
            if last:
                self.finish()
            else:
                self._finish_timed(step)
            self.save(step)
        if last:
            self.ensure()
            if config.save or step == self.trainer.job.train.steps:  # the checkpoint on disk is newer
                self.memory.forget()

    def end(self) -> None:
        """Waits for saves under way, before the run ends with an error that all ranks have."""
        self.finish(consequence="")
        self.memory.finish()

    def close(self) -> None:
        """Leaves the exchange of snapshots in memory."""
        self.memory.close()

    def finish(self, consequence: str = "; training continues, and the next checkpoint tries again") -> None:
        """Waits for the save under way, if there is one; prints its problem with the `consequence`, if it failed."""
        if problem := self._finished():
            self.say(f"{problem}{consequence}")

    def ensure(self) -> None:
        """Waits for the save under way, if there is one; raises TrainingError if it failed."""
        if problem := self._finished():
            raise TrainingError(problem)

    def _finished(self) -> str | None:
        """Waits for the save under way, if there is one, and reports it; returns why it failed, if it did."""
        under_way = self.saver.saving
        problem = self.saver.finish()
        if under_way is not None and problem is None:
            self.on_saved(under_way.manifest.step)
        return problem

    def quarantine(self, first: int) -> None:
        """Sets aside the checkpoints of step `first` and after, which may be damaged."""
        self.memory.forget(after=first - 1)
        with suppress(OSError):  # the error that the run ends with matters more
            for checkpoint in self.store.complete() if self.control.rank == 0 else ():
                if checkpoint.step >= first:
                    aside = set_aside(self.store, checkpoint.path, "suspect")
                    self.say(f"{checkpoint.path.name} may be damaged, and {aside}")

    def _finish_timed(self, step: int) -> None:
        """Waits for the previous save. The first time that this takes long, a note says how to avoid it."""
        previous, start = self.saver.saving, time.monotonic()
        self.finish()
        waited = time.monotonic() - start
        if previous is None or waited < _REPORTED_WAIT or self.wait_reported:
            return
        self.wait_reported = True
        write_seconds, every = start - previous.begun + waited, self.trainer.job.checkpoint.every
        where = "the disk" if isinstance(self.store.directory, Path) else self.store.directory
        enough = math.ceil(every * write_seconds / (write_seconds - waited))
        self.say(
            f"step {step} waited {waited:.1f} s for {where}: the checkpoint before took {write_seconds:.1f} s to "
            f"write; with checkpoint.every={enough} steps would not wait"
        )

    def save(self, step: int) -> None:
        """Starts a save to disk. Returns when the snapshot is taken, or under way. Collective."""
        self.trainer.corruption.before_save(step)
        self.saved = step
        engine = self.trainer.engine
        engine.snapshot_copied = self.saver.start(self.shards(), self.manifest(step), engine.snapshot_copied)

    def save_to_memory(self, step: int) -> None:
        """Starts a save to host memory that outlives the ranks. Collective."""
        engine = self.trainer.engine
        engine.snapshot_copied = self.memory.start(self.shards(), self.manifest(step), engine.snapshot_copied)

    def shards(self) -> dict[str, Shard]:
        """The shards that this rank writes, by key."""
        engine = self.trainer.engine
        return shards_to_write(engine.weights, self.shapes, engine.optimizer, engine.buffers)

    def manifest(self, step: int) -> Manifest:
        return Manifest(
            step=step,
            samples=self.trainer.samples,
            updates=self.trainer.engine.optimizer.updates,
            optimizer=True,
            data=self.data,
            watched=self.trainer.policy.keep(),
            job=msgspec.to_builtins(self.trainer.job),
        )
