"""A trainer and its checkpoints: which one it resumes, and when it saves."""

import math
import time
from pathlib import Path

import msgspec

from fivefold.checkpoint.load import Say, load, newest
from fivefold.checkpoint.pieces import Piece
from fivefold.checkpoint.save import Saver
from fivefold.checkpoint.state import held, optimizer_of, stored_buffers, written
from fivefold.checkpoint.store import Checkpoint, Manifest, Store
from fivefold.parallel.control import Control
from fivefold.support.errors import TrainingError, UserError
from fivefold.train.loop import Trainer
from fivefold.train.resuming import misfits

_LONG = 1.0  # seconds of waiting that are worth a word


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

    def restore(self) -> Checkpoint | None:
        """Collective: the trainer as the newest good checkpoint has it, if there is one."""
        checkpoint = newest(self.store, self.control, self.say)
        if checkpoint is None:
            return None
        manifest, job = checkpoint.manifest, self.trainer.job
        if problems := misfits(checkpoint, job):
            raise UserError(problems if self.control.rank == 0 else [])  # all ranks have found them, and one says so
        engine = self.trainer.engine
        same = optimizer_of(manifest) == job.optimizer.name  # another optimizer's states are of no use
        buffers = stored_buffers(engine.buffers, checkpoint)
        load(checkpoint, held(engine.weights, self.shapes, engine.optimizer if same else None, buffers))
        engine.optimizer.restore(manifest.updates)
        self.trainer.done, self.trainer.samples = manifest.step, manifest.samples
        self.saved = manifest.step
        return checkpoint

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
        if config.save and step != self.saved and (must or (config.every and step % config.every == 0)):
            self.finish() if must else self._finish_last(step)
            self.save(step)
        if must:
            self.ensure()

    def finish(self, then: str = "; training goes on, and the next checkpoint is another try") -> None:
        """Wait for the save under way, if there is one, and tell if it was not written, and what happens then."""
        if problem := self.saver.finish():
            self.say(f"{problem}{then}")

    def ensure(self) -> None:
        """Wait for the save under way, if there is one; TrainingError if it was not written."""
        if problem := self.saver.finish():
            raise TrainingError(problem)

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
        self.saved = step
        self.trainer.engine.copied = self.saver.start(self.pieces(), self.manifest(step))

    def pieces(self) -> dict[str, Piece]:
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
            job=msgspec.to_builtins(self.trainer.job),
        )
