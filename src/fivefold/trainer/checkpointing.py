"""A trainer and its checkpoints: which one it resumes, and when it saves, on disk and in memory."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from fivefold.checkpoint.find import find
from fivefold.checkpoint.load import Say, damage, load, newest, set_aside
from fivefold.checkpoint.memory import Began, Candidate, abandoned, begin, starts
from fivefold.checkpoint.memory_load import MemoryCheckpointer
from fivefold.checkpoint.save import Saver
from fivefold.checkpoint.shards import Shard, saveable_tensors, stored_buffers, written
from fivefold.checkpoint.store import Checkpoint, Damaged, Manifest, Store
from fivefold.parallel.control import Control
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.places import Place, place_of
from fivefold.trainer.loop import Trainer
from fivefold.trainer.resuming import misfits

_LONG = 1.0  # seconds of waiting that are worth a word


def _found(named: str, rank: int) -> tuple[str, list[str]]:
    """On rank 0: where the weights lie that a job names, or why that cannot be told."""
    try:
        return (str(find(named).path) if rank == 0 else ""), []
    except UserError as error:
        return "", error.problems


class Checkpoints:
    """Saves the trainer's state. After a save that failed the run goes on, and the next one that is due is another try;
    if the last one fails, so does the run."""

    def __init__(self, store: Store, control: Control, trainer: Trainer, say: Say):
        self.store, self.control, self.trainer, self.say = store, control, trainer, say
        self.saver = Saver(store, control, trainer.job.checkpoint, trainer.mesh.device)
        self.shapes = {parameter.name: parameter.shape for parameter in trainer.job.model.parameters()}
        self.data = trainer.sources.fingerprint
        self.saved = 0  # the last step of which a save was begun, or that was loaded
        self.told = False  # that steps wait for the disk
        self.memory = MemoryCheckpointer(control, say)
        self.starts: list[Began] = []  # of the run, before this one
        self.began, self.seconds = "", 0.0  # which checkpoint was loaded, and how long that took
        self.on_saved: Callable[[int], None] = lambda step: None  # told the step of each checkpoint that is complete
        self.weights = ""  # whose weights a new run was begun with
        self.start, self.read = 0.0, 0.0  # of these seconds, until masters and states were in place

    def restore(self) -> Checkpoint | None:
        """Collective: the trainer as the newest good checkpoint has it, in memory or on disk, if there is one."""
        self.start, wanted = time.monotonic(), bool(self.trainer.job.checkpoint.memory_every)
        run = self.store.directory.parent
        self.memory.enter(self.trainer.mesh, run, wanted)
        self.starts = self._starts(run) if self.control.rank == 0 and self.memory.nodes is not None else []
        candidates = self.memory.find(self._counts)
        disk: int | None = self.control.broadcast_value(self._on_disk() if candidates else None, int | None)
        checkpoint = self._from_memory([candidate for candidate in candidates if candidate.step >= (disk or 0)], disk)
        if checkpoint is None:
            checkpoint = self._from_disk([candidate for candidate in candidates if candidate.step < (disk or 0)], disk)
        if checkpoint is None and self.trainer.job.run.weights:
            self._from_others(self.trainer.job.run.weights)
        if self.control.rank == 0 and self.memory.nodes is not None:
            begin(run, self.starts, self.memory.nodes.start, checkpoint.manifest.step if checkpoint else 0)
        self.seconds = time.monotonic() - self.start
        return checkpoint

    def _starts(self, run: Place) -> list[Began]:
        """Where those before are not known, no snapshot that there is can be told to be of this run as it went on."""
        try:
            return starts(run)
        except Damaged as error:
            self.say(f"{error}; snapshots in memory are left alone, and the newest checkpoint on disk is taken")
            assert self.memory.nodes is not None
            return [Began(self.memory.nodes.start, -1)]

    def _from_memory(self, candidates: list[Candidate], disk: int | None) -> Checkpoint | None:
        kept = self.memory.load(candidates, self._wanted)
        if kept is None:
            return None
        candidate, checkpoint = kept
        has = "disk has none" if disk is None else f"disk has step {disk}"
        self.began = f"memory, after step {candidate.step} ({'; '.join(filter(None, (candidate.said, has)))})"
        self._begin(checkpoint)
        return checkpoint

    def _from_disk(self, memory: list[Candidate], disk: int | None) -> Checkpoint | None:
        """What else memory has is older than the newest there, and counts if that one is damaged."""
        checkpoint, refusal = None, None
        try:
            checkpoint = newest(self.store, self.control, self.say, self._stands)
        except UserError as error:
            refusal = error
        last = checkpoint.manifest.step if checkpoint else -1
        if before := self._from_memory([candidate for candidate in memory if candidate.step > last], disk):
            return before
        if refusal:
            raise refusal
        if checkpoint is not None:
            self.began = f"{checkpoint.path}, after step {checkpoint.manifest.step}"
            self._take(checkpoint)
        return checkpoint

    def _from_others(self, named: str) -> None:
        """The weights of another run, with nothing else of it: this one is at its first step."""
        path, problems = self.control.broadcast_value(_found(named, self.control.rank), tuple[str, list[str]])
        engine, weights = self.trainer.engine, Checkpoint(place_of(path)) if path else None
        if weights is None or (problems := damage(weights, self.control) or misfits(weights, self.trainer.job)):
            raise UserError(problems if self.control.rank == 0 else [])
        load(weights, saveable_tensors(engine.weights, self.shapes, None, stored_buffers(engine.buffers, weights)))
        engine.optimizer.restore(0)
        self.weights = f"{weights.path}, after step {weights.manifest.step}"

    def _on_disk(self, most: float = math.inf) -> int | None:
        """The newest step there up to `most`, by its name."""
        with suppress(OSError):
            earlier = (checkpoint for checkpoint in self.store.complete() if checkpoint.step <= most)
            return next((checkpoint.step for checkpoint in earlier if self._stands(checkpoint)), None)
        return None

    def _stands(self, checkpoint: Checkpoint) -> bool:
        """Whether no rollback has undone it; what cannot be read is for the load to say."""
        with suppress(UserError):
            return not self.trainer.policy.decisions.undone(checkpoint.manifest.samples)
        return True

    def _counts(self, candidate: Candidate) -> bool:
        """On rank 0: whether a snapshot is of this run as it went on, by rollbacks and by later starts."""
        undone = self.trainer.policy.decisions.undone(candidate.samples)
        return not (undone or abandoned(candidate.name, candidate.step, self.starts))

    def _wanted(self, checkpoint: Checkpoint) -> dict[str, Shard]:
        """What this rank fills from a checkpoint, which must be of its model."""
        engine, job = self.trainer.engine, self.trainer.job
        if problems := misfits(checkpoint, job):
            raise UserError(problems if self.control.rank == 0 else [])  # all ranks have found them, and one says so
        same = checkpoint.manifest.states_of == job.optimizer.name  # another optimizer's states are of no use
        buffers = stored_buffers(engine.buffers, checkpoint)
        return saveable_tensors(engine.weights, self.shapes, engine.optimizer if same else None, buffers)

    def _take(self, checkpoint: Checkpoint) -> None:
        """The trainer as a checkpoint has it."""
        pieces = self._wanted(checkpoint)
        if not self.memory.take(checkpoint, pieces):
            load(checkpoint, pieces)
            self.saved = checkpoint.manifest.step
        self._begin(checkpoint)

    def _begin(self, checkpoint: Checkpoint) -> None:
        """Its tensors are loaded."""
        self.read, manifest = time.monotonic() - self.start, checkpoint.manifest
        self.trainer.engine.optimizer.restore(manifest.updates)
        self.trainer.policy.restore(manifest.watched, checkpoint.path)
        self.trainer.done, self.trainer.samples = manifest.step, manifest.samples

    def before(self, step: int) -> Checkpoint | None:
        """Collective: the newest good checkpoint of a step up to this one, if there is any."""
        self.finish()
        self.memory.finish()
        candidates = self.memory.find(lambda candidate: candidate.step <= step and self._counts(candidate))
        disk = self.control.broadcast_value(self._on_disk(step) if candidates else None, int | None)
        if checkpoint := self.memory.sound([candidate for candidate in candidates if candidate.step >= (disk or 0)]):
            return checkpoint
        return newest(
            self.store, self.control, self.say, lambda checkpoint: checkpoint.step <= step and self._stands(checkpoint)
        )

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Collective, in mid-run: the trainer as it was then. Checkpoints of later steps are deleted."""
        self._take(checkpoint)
        self.saved = min(self.saved, checkpoint.step)  # steps that come again are saved again
        self.control.all_gather_values(True, bool)  # all have read it
        self.memory.forget(after=checkpoint.step)
        if self.control.rank == 0:
            try:
                self.store.undo(checkpoint.step)
            except OSError as error:
                self.say(f"checkpoints after step {checkpoint.step} cannot be deleted: {error.strerror}")

    def prepare(self) -> None:
        """Before the first step: do what can be done by then."""
        config = self.trainer.job.checkpoint
        if config.save and config.every:
            self.saver.staging.prepare(self.pieces())

    def after(self, step: int, must: bool) -> None:
        """A step is done. `must` says that it is the last one of this start."""
        config = self.trainer.job.checkpoint
        if self.saver.ended:
            self.finish()
        if config.memory_every and step % config.memory_every == 0 and not must:
            self.remember(step)
        if config.save and step != self.saved and (must or (config.every and step % config.every == 0)):
            self.finish() if must else self._finish_last(step)
            self.save(step)
        if must:
            self.ensure()
            if config.save or step == self.trainer.job.train.steps:  # what disk has needs no other copy
                self.memory.forget()

    def end(self) -> None:
        """The run ends with an error that all ranks have: wait for what is under way, and tell of it."""
        self.finish(then="")
        self.memory.finish()

    def close(self) -> None:
        """This rank takes part no more."""
        self.memory.close()

    def finish(self, then: str = "; training continues, and the next checkpoint tries again") -> None:
        """Wait for the save under way, if there is one, and tell if it was not written, and what happens then."""
        if problem := self._finished():
            self.say(f"{problem}{then}")

    def ensure(self) -> None:
        """Wait for the save under way, if there is one; TrainingError if it was not written."""
        if problem := self._finished():
            raise TrainingError(problem)

    def _finished(self) -> str | None:
        """Wait for the save under way, if there is one; why it was not written. One that was is told of."""
        under_way = self.saver.saving
        problem = self.saver.finish()
        if under_way is not None and problem is None:
            self.on_saved(under_way.manifest.step)
        return problem

    def quarantine(self, first: int) -> None:
        """Set aside the checkpoints of step `first` and after: a watcher has found that they may be damaged."""
        self.memory.forget(after=first - 1)
        with suppress(OSError):  # what was found says more
            for checkpoint in self.store.complete() if self.control.rank == 0 else ():
                if checkpoint.step >= first:
                    aside = set_aside(self.store, checkpoint.path, "suspect")
                    self.say(f"{checkpoint.path.name} may be damaged, and {aside}")

    def _finish_last(self, step: int) -> None:
        """Finish the save before this one. The first time that steps wait for it, a note says how to avoid that."""
        last, start = self.saver.saving, time.monotonic()
        self.finish()
        waited = time.monotonic() - start
        if last is None or waited < _LONG or self.told:
            return
        self.told = True
        steps, every = start - last.begun, self.trainer.job.checkpoint.every
        where = "the disk" if isinstance(self.store.directory, Path) else self.store.directory
        self.say(
            f"step {step} waited {waited:.1f} s for {where}: the checkpoint before took {steps + waited:.1f} s to "
            f"write; with checkpoint.every={math.ceil(every * (steps + waited) / steps)} steps would not wait"
        )

    def save(self, step: int) -> None:
        """Collective. Returns when the snapshot is taken, or under way."""
        self.trainer.corruption.before_save(step)
        self.saved = step
        engine = self.trainer.engine
        engine.snapshot_copied = self.saver.start(self.pieces(), self.manifest(step), engine.snapshot_copied)

    def remember(self, step: int) -> None:
        """Collective. The same, into memory that outlives ranks."""
        engine = self.trainer.engine
        engine.snapshot_copied = self.memory.start(self.pieces(), self.manifest(step), engine.snapshot_copied)

    def pieces(self) -> dict[str, Shard]:
        """What this rank writes."""
        engine = self.trainer.engine
        return written(engine.weights, self.shapes, engine.optimizer, engine.buffers)

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
