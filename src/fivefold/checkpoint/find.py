"""Which checkpoint a person means: a run's directory, its `checkpoints`, or one of them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import MANIFEST, Checkpoint, Store
from fivefold.support.errors import Note, UserError
from fivefold.support.places import Place, place_of


def store_of(run: str | Place) -> Store:
    """Of a run's directory, or the `checkpoints` in it."""
    path = place_of(run)
    with reachable(path):
        storage = storage_of(path)
        if storage.holds(path / "checkpoints"):
            return Store(path / "checkpoints")
        there = storage.holds(path)
        if there and (path.name == "checkpoints" or Store(path).complete()):
            return Store(path)
    if not isinstance(path, Path):
        raise UserError(f"{path} has no checkpoints{'' if there else ': nothing is there'}")
    runs = sorted(str(other.parent) for other in path.parent.glob("*/checkpoints")) if path.parent.is_dir() else []
    known = f"; {path.parent} has: {', '.join(runs[:5])}" if runs else ""
    raise UserError(f"{path} {'has no checkpoints' if there else 'is no directory'}{known}")


@contextmanager
def reachable(path: str | Place) -> Iterator[None]:
    """Around a look at checkpoints: what a server or a file system refuses is a sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot look at {path}: {error.strerror or error}") from None


def run_of(checkpoint: Checkpoint) -> Place:
    """The run's directory that a checkpoint lies in."""
    return checkpoint.path.parent.parent


def beside(checkpoint: Checkpoint, name: str) -> Path | None:
    """A file of the run's directory that a checkpoint lies in, if there is one."""
    run = run_of(checkpoint)
    return run / name if isinstance(run, Path) and (run / name).is_file() else None


def one_of(run: str | Place) -> Checkpoint | None:
    """The checkpoint that a path itself is, if it is one."""
    path = place_of(run)
    with reachable(path):
        if not storage_of(path).exists(path / MANIFEST):
            return None
    return Checkpoint(path.resolve() if isinstance(path, Path) else path)  # it may be the link `latest`


def find(path: str | Place, step: int | None = None) -> Checkpoint:
    """The one of `step`, or the newest that is complete and has all its files."""
    if one := one_of(path):
        if step is not None and (found := one.manifest.step) != step:
            raise UserError(f"{path} is the checkpoint of step {found}, and --step {step} is another; leave one out")
        return one
    store = store_of(path)
    with reachable(path):
        complete = store.complete()
    if step is not None:
        if same := [one for one in complete if one.step == step]:
            return same[0]
        known = ", ".join(str(one.step) for one in reversed(complete)) or "none"
        raise UserError(f"{path} has no complete checkpoint of step {step}; it has: {known}")
    for one in complete:
        if not (misfits := one.misfits()):
            return one
        warnings.warn(Note(f"{misfits[0]}; the checkpoint before it is taken"), stacklevel=2)
    raise UserError(f"{path} has no complete checkpoint")
