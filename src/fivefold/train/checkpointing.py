"""A trainer and its checkpoints: which one it resumes, and when it saves."""

import hashlib
import math
import time

import msgspec

from fivefold.checkpoint.load import Say, load, newest
from fivefold.checkpoint.pieces import Piece
from fivefold.checkpoint.save import Saver
from fivefold.checkpoint.state import held, optimizer_of, written
from fivefold.checkpoint.store import Checkpoint, Manifest, Store
from fivefold.data.index import NAME as INDEX
from fivefold.job.config import Job
from fivefold.optimizers import OPTIMIZERS
from fivefold.parallel.control import Control
from fivefold.support.errors import TrainingError, UserError
from fivefold.train.loop import Trainer

_LONG = 1.0  # seconds of waiting that are worth a word


class Checkpoints:
    """Saves the trainer's state. After a save that failed the run goes on, and the next one that is due is another try;
    if the last one fails, so does the run."""

    def __init__(self, store: Store, control: Control, trainer: Trainer, say: Say):
        self.store, self.control, self.trainer, self.say = store, control, trainer, say
        self.saver = Saver(store, control, trainer.job.checkpoint, trainer.mesh.device)
        self.shapes = {parameter.name: parameter.shape for parameter in trainer.job.model.parameters()}
        index = (trainer.sources.path / INDEX).read_bytes()  # which has the sha256 of every file of the data
        self.data = hashlib.sha256(index).hexdigest()
        self.saved = 0  # the last step of which a save was begun, or that was loaded
        self.told = False  # that steps wait for the disk

    def restore(self) -> Checkpoint | None:
        """Collective: the trainer as the newest good checkpoint has it, if there is one."""
        checkpoint = newest(self.store, self.control, self.say)
        if checkpoint is None:
            return None
        manifest, job = checkpoint.manifest, self.trainer.job
        if problems := conflicts(manifest, job):
            raise UserError(problems if self.control.rank == 0 else [])  # all ranks have found them, and one says so
        for note in changes(manifest, job, self.data):
            self.say(note)
        engine = self.trainer.engine
        same = optimizer_of(manifest) == job.optimizer.name  # another optimizer's states are of no use
        load(checkpoint, held(engine.weights, self.shapes, engine.optimizer if same else None))
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
        self.say(
            f"step {step} waited {waited:.1f} s for the disk: the checkpoint before took {steps + waited:.1f} s to "
            f"write; with checkpoint.every={math.ceil(every * (steps + waited) / steps)} steps would not wait"
        )

    def save(self, step: int) -> None:
        """Collective. Returns when the snapshot is taken, or under way."""
        self.saved = step
        self.trainer.engine.copied = self.saver.start(self.pieces(), self.manifest(step))

    def pieces(self) -> dict[str, Piece]:
        """What this rank writes."""
        engine = self.trainer.engine
        return written(engine.weights, self.shapes, engine.optimizer)

    def manifest(self, step: int) -> Manifest:
        return Manifest(
            step=step,
            samples=self.trainer.samples,
            updates=self.trainer.engine.optimizer.updates,
            optimizer=True,
            data=self.data,
            job=msgspec.to_builtins(self.trainer.job),
        )


def conflicts(manifest: Manifest, job: Job) -> list[str]:
    """Why a job cannot resume from a checkpoint: its model has other sizes."""
    ours, theirs = msgspec.json.decode(msgspec.json.encode(job.model)), manifest.job.get("model", {})
    free = {"name", "dropout", "init_std"}  # which do not make the weights others
    return [
        f"model.{key}={ours[key]!r}, and the run's checkpoint of step {manifest.step} has {theirs.get(key)!r}; --fresh "
        "starts a run of its own"
        for key in ours
        if key not in free and ours[key] != theirs.get(key)
    ]


def changes(manifest: Manifest, job: Job, data: str) -> list[str]:
    """Settings that differ from the run so far and change its numbers. Layouts do not change them."""
    ours = msgspec.json.decode(msgspec.json.encode(job))  # as the manifest has it: lists, no tuples
    notes = []
    for section, keys in _TOLD.items():
        for key in keys:
            before, now = manifest.job.get(section, {}).get(key), ours[section].get(key)
            if before is not None and before != now:
                notes.append(f"{section}.{key} was {before} up to step {manifest.step}, and is {now} from here on")
    if manifest.data and data != manifest.data:
        notes.append(f"the data is not that of the run so far: sample {manifest.samples} and on are the new data's")
    return notes


_TOLD = {
    "data": ("seq", "seed", "document_mask"),
    "optimizer": ("name", *dict.fromkeys(field for kind in OPTIMIZERS.values() for field in kind.__struct_fields__)),
    "train": ("steps", "batch", "seed", "dtype", "label_smoothing", "z_loss"),
}
