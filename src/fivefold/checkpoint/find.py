"""Finds a checkpoint by a path: of a run's directory, its `checkpoints`, or one of them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fivefold.checkpoint.manifest import MANIFEST, Checkpoint
from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.tensors import model_key
from fivefold.job.config import Job
from fivefold.job.reading import job_from
from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import Note, UserError
from fivefold.support.storage_place import Place, place_of


def store_of(run: str | Place) -> Store:
    """The store of a run's directory, or of the `checkpoints` in it."""
    path = place_of(run)
    with reachable(path):
        storage = storage_of(path)
        if storage.folder_exists(path / "checkpoints"):
            return Store(path / "checkpoints")
        exists = storage.folder_exists(path)
        if exists and (path.name == "checkpoints" or Store(path).complete()):
            return Store(path)
    if not isinstance(path, Path):
        raise UserError(f"{path} has no checkpoints{'' if exists else ': nothing is there'}", "checkpoint.none")
    runs = sorted(str(other.parent) for other in path.parent.glob("*/checkpoints")) if path.parent.is_dir() else []
    known = f"; {path.parent} has: {', '.join(runs[:5])}" if runs else ""
    raise UserError(f"{path} {'has no checkpoints' if exists else 'is not a directory'}{known}", "checkpoint.none")


@contextmanager
def reachable(path: str | Place) -> Iterator[None]:
    """Turns an OSError of the storage into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot look at {path}: {error.strerror or error}", "file.read") from None


def run_of(checkpoint: Checkpoint) -> Place:
    """The directory of a checkpoint's run."""
    return checkpoint.path.parent.parent


def file_in_run(checkpoint: Checkpoint, name: str) -> Path | None:
    """The file `name` of the run's directory, if there is one on this machine."""
    run = run_of(checkpoint)
    return run / name if isinstance(run, Path) and (run / name).is_file() else None


def checkpoint_at(run: str | Place) -> Checkpoint | None:
    """The checkpoint at exactly this path, if it is one."""
    path = place_of(run)
    with reachable(path):
        if not storage_of(path).file_exists(path / MANIFEST):
            return None
    return Checkpoint(path.resolve() if isinstance(path, Path) else path)  # it may be the link `latest`


def find(path: str | Place, step: int | None = None) -> Checkpoint:
    """The checkpoint of `step`, or the newest that is complete and has all its files."""
    if checkpoint := checkpoint_at(path):
        if step is not None and (its_step := checkpoint.manifest.step) != step:
            raise UserError(
                f"{path} is the checkpoint of step {its_step}, and --step {step} is another; leave one out",
                "checkpoint.step",
            )
        return checkpoint
    store = store_of(path)
    with reachable(path):
        complete = store.complete()
    if step is not None:
        if same := [checkpoint for checkpoint in complete if checkpoint.step == step]:
            return same[0]
        known = ", ".join(str(checkpoint.step) for checkpoint in reversed(complete)) or "none"
        raise UserError(f"{path} has no complete checkpoint of step {step}; it has: {known}", "checkpoint.step")
    damage: list[str] = []
    for checkpoint in complete:
        if not (misfits := checkpoint.misfits()):
            for problem in damage:
                warnings.warn(Note(f"{problem}; the checkpoint before it is taken"), stacklevel=2)
            return checkpoint
        damage += misfits[:1]
    if damage:
        raise UserError(damage, "checkpoint.damaged")
    raise UserError(f"{path} has no complete checkpoint", "checkpoint.none")


def job_of(checkpoint: Checkpoint, layout: Layout | None = None, run: Path | None = None) -> Job:
    """The checkpoint's job; with `layout` in place of its own, and with `run` as the job of that directory.

    Raises UserError unless its model has the shapes of the tensors, so that nobody allocates more than there is.
    """
    job = stored_job(checkpoint)
    if problems := job.model.problems() or _misfits(checkpoint, job.model):
        raise UserError((f"the job in {checkpoint.path}: {problem}" for problem in problems), "checkpoint.job")
    replace = msgspec.structs.replace
    if layout is not None:
        job = replace(job, layout=layout)
    if run is not None:
        checkpoint_config = replace(job.checkpoint, url="")  # the checkpoint is in the directory
        run_config = replace(job.run, name=run.name, dir=str(run.absolute().parent))
        job = replace(job, run=run_config, checkpoint=checkpoint_config)
    return job


def stored_job(checkpoint: Checkpoint) -> Job:
    """The job as the checkpoint has it."""
    try:
        return job_from(checkpoint.manifest.job)
    except (msgspec.ValidationError, ValueError, ArithmeticError) as error:
        unread = f"the job in {checkpoint.path} cannot be read by this release: {error}"
        raise UserError(unread, "checkpoint.job") from None


def _misfits(checkpoint: Checkpoint, spec: ModelSpec) -> list[str]:
    """The parameters of the model that the checkpoint's tensors do not have, as sentences."""
    tensors = checkpoint.tensors
    if spec.layers > len(tensors):
        return [f"model.layers={spec.layers}, and the checkpoint has {len(tensors)} tensors"]
    problems = []
    for parameter in spec.parameters():
        stored = tensors.get(model_key(parameter.name))
        if stored is None or stored.shape != parameter.shape:
            has = f"shape {list(stored.shape)}" if stored else "none"
            problems.append(f"{parameter.name} has shape {list(parameter.shape)}, and the checkpoint has {has}")
    return problems
