"""Which checkpoint a person means: a run's directory, its `checkpoints`, or one of them."""

import warnings
from pathlib import Path

from fivefold.checkpoint.store import MANIFEST, Checkpoint, Store
from fivefold.support.errors import Note, UserError


def store_of(path: Path) -> Store:
    """Of a run's directory, or the `checkpoints` in it."""
    inside = path / "checkpoints"
    if inside.is_dir():
        return Store(inside)
    if path.is_dir() and (path.name == "checkpoints" or Store(path).complete()):
        return Store(path)
    runs = sorted(str(other.parent) for other in path.parent.glob("*/checkpoints")) if path.parent.is_dir() else []
    known = f"; {path.parent} has: {', '.join(runs[:5])}" if runs else ""
    what = "is no directory" if not path.is_dir() else "has no checkpoints"
    raise UserError(f"{path} {what}{known}")


def run_of(checkpoint: Checkpoint) -> Path:
    """The run's directory that a checkpoint lies in."""
    return checkpoint.path.parent.parent


def find(path: Path, step: int | None = None) -> Checkpoint:
    """The one of `step`, or the newest that is complete and has all its files."""
    if (path / MANIFEST).is_file():
        one = Checkpoint(path.resolve())  # it may be the link `latest`
        if step is not None and (found := one.manifest.step) != step:
            raise UserError(f"{path} is the checkpoint of step {found}, and --step {step} is another; leave one out")
        return one
    complete = store_of(path).complete()
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
