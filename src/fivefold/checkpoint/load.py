"""Loading: the newest checkpoint that is what its manifest says, into the ranks of any layout."""

from collections.abc import Callable

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader

from fivefold.checkpoint.pieces import LoadPlan, Pieces, quietly
from fivefold.checkpoint.store import Checkpoint, Damaged, Store
from fivefold.parallel.control import Control
from fivefold.support.errors import UserError

Say = Callable[[str], None]


def newest(store: Store, control: Control, say: Say) -> Checkpoint | None:
    """Collective: the newest complete checkpoint whose bytes are those of its manifest; each rank hashes a share.

    What is incomplete or damaged is set aside and said, and the one before it is tried. What cannot be opened, or is
    of another release, is refused and stays where it is; so is a run of which no checkpoint is good.
    """
    if control.rank == 0:
        for path in store.incomplete():
            aside = store.set_aside(path, "incomplete")
            say(f"{path.name} was never finished; set aside as {aside.name}")
    tried = 0
    while True:
        checkpoint, refusal = control.from_first(_candidate(store, tried) if control.rank == 0 else (None, []))
        if refusal:
            raise UserError(refusal if control.rank == 0 else [])
        if checkpoint is None:
            return None
        tried += 1
        problems = [problem for found in control.from_all(_share(checkpoint, control)) for problem in found]
        if not problems:
            return checkpoint
        if control.rank == 0:
            aside = store.set_aside(checkpoint.path, "damaged")
            for problem in problems:
                say(problem)
            say(f"{checkpoint.path.name} is not used, and set aside as {aside.name}; the one before it is tried")


def _candidate(store: Store, tried: int) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint, or why the run must not resume."""
    newest = next(iter(store.complete()), None)
    if newest is None:
        fresh = "--fresh starts over in a new directory"
        return None, [f"none of the {tried} checkpoints in {store.directory} is good; {fresh}"] if tried else []
    try:
        assert newest.manifest
    except Damaged:
        pass
    except UserError as error:
        return None, error.problems
    return newest, []


def _share(checkpoint: Checkpoint, control: Control) -> list[str]:
    try:
        files = checkpoint.manifest.files
    except Damaged as error:
        return error.problems if control.rank == 0 else []
    return checkpoint.damage(files[control.rank :: control.size])


def load(checkpoint: Checkpoint, pieces: Pieces) -> None:
    """Fill the pieces' memory; each rank reads what it needs, and no rank waits for another."""
    with quietly():
        reader = FileSystemReader(checkpoint.path)
        state_dict_loader.load(dict(pieces), storage_reader=reader, planner=LoadPlan(), no_dist=True)
