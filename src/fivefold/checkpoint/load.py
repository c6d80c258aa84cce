"""Loading: the newest checkpoint that is what its manifest says, into the ranks of any layout."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fivefold.checkpoint.pieces import Piece, Pieces, raw
from fivefold.checkpoint.storage import Reader
from fivefold.checkpoint.store import Checkpoint, Damaged, Store
from fivefold.checkpoint.tensors import Chunk
from fivefold.launch import faults
from fivefold.launch.cores import for_files, side_by_side
from fivefold.launch.heartbeat import beat, enter
from fivefold.parallel.control import Control
from fivefold.support.errors import UserError
from fivefold.support.places import Place

Say = Callable[[str], None]


def newest(
    store: Store, control: Control, say: Say, usable: Callable[[Checkpoint], bool] = lambda _: True
) -> Checkpoint | None:
    """Collective: the newest complete checkpoint whose bytes are those of its manifest; each rank hashes a share.

    Rank 0 leaves those out that are not `usable`. What is incomplete or damaged is set aside and said, and the one
    before it is tried. What cannot be opened, or is of another release, is refused and stays where it is; so is a run
    of which no checkpoint is good.
    """
    bad: set[Place] = set()
    while True:
        found = _candidate(store, bad, say, usable) if control.rank == 0 else (None, [])
        name, refusal = control.from_first(found, tuple[str | None, list[str]])
        if refusal:
            raise UserError(refusal if control.rank == 0 else [])
        if name is None:
            return None
        checkpoint = Checkpoint(store.directory / name)
        enter(f"the reading of {name}")
        shares = control.from_all(_share(checkpoint, control), tuple[list[str], list[str]])
        if refusal := _all(refused for _, refused in shares):
            raise UserError(refusal if control.rank == 0 else [])
        problems = _all(damage for damage, _ in shares)
        if not problems:
            return checkpoint
        bad.add(checkpoint.path)
        if control.rank == 0:
            for problem in problems:
                say(problem)
            aside = set_aside(store, checkpoint.path, "damaged")
            say(f"{name} is not used, and {aside}; the one before it is tried")


def _all(lists: Iterable[list[str]]) -> list[str]:
    """Every sentence once."""
    return list(dict.fromkeys(sentence for sentences in lists for sentence in sentences))


def set_aside(store: Store, path: Place, how: str) -> str:
    try:
        return f"set aside as {store.set_aside(path, how).name}"
    except OSError as error:
        return f"stays where it is: {error.strerror}"


def _candidate(
    store: Store, bad: set[Place], say: Say, usable: Callable[[Checkpoint], bool]
) -> tuple[str | None, list[str]]:
    """The newest checkpoint that is not known to be bad, or why the run must not resume."""
    try:
        for path in store.incomplete() if not bad else ():
            say(f"{path.name} was never finished; {set_aside(store, path, 'incomplete')}")
        store.prune()
        newest = next((one for one in store.complete() if one.path not in bad and usable(one)), None)
    except OSError as error:
        return None, [f"cannot list {store.directory}: {error.strerror or error}"]
    if newest is not None:
        return newest.path.name, []
    fresh = "--fresh starts over in a new directory"
    return None, [f"none of the {len(bad)} checkpoints in {store.directory} is good; {fresh}"] if bad else []


def _share(checkpoint: Checkpoint, control: Control) -> tuple[list[str], list[str]]:
    """What is damaged in this rank's share of the files, and why a checkpoint must not be touched."""
    faults.strike("read")
    try:
        return checkpoint.damage(checkpoint.manifest.files[control.rank :: control.size], beat), []
    except Damaged as error:
        return error.problems, []
    except UserError as error:
        return [], error.problems


def load(checkpoint: Checkpoint, pieces: Pieces) -> None:
    """Fill the pieces' memory; each rank reads what it needs, and no rank waits for another."""
    todo: dict[str, list[tuple[str, Chunk, Piece, Tensor]]] = {}
    for name, piece in pieces.items():
        stored = checkpoint.tensors.get(name)
        if stored is None or stored.shape != tuple(piece.shape):
            has = f"has {name} of shape {list(stored.shape)}" if stored else f"has no tensor {name}"
            raise UserError(f"{checkpoint.path} {has}, and {list(piece.shape)} is wanted")
        into = piece.make()
        for chunk in stored.chunks:
            if all(first < side.stop and side.start < first + size
                   for first, size, side in zip(chunk.offsets, chunk.sizes, piece.box, strict=True)):  # fmt: skip
                todo.setdefault(chunk.file, []).append((name, chunk, piece, into))

    def read(file: str) -> None:
        with checkpoint.storage.open(checkpoint.path / file) as stream:
            for name, chunk, piece, into in sorted(todo[file], key=lambda one: one[1].start):
                start = checkpoint.numbers_at(stream, name, chunk)
                _fill(stream, start, chunk, checkpoint.tensors[name].dtype, piece, into)

    try:
        side_by_side(read, list(todo), for_files())
    except OSError as error:
        raise UserError(f"cannot read {checkpoint.path}: {error.strerror or error}") from None


@torch.no_grad()
def _fill(stream: Reader, start: int, chunk: Chunk, dtype: str, piece: Piece, into: Tensor) -> None:
    """The part of a piece that a chunk has. Its rows lie together, so that no others are read."""
    shared = [
        range(max(first, side.start), min(first + size, side.stop))
        for first, size, side in zip(chunk.offsets, chunk.sizes, piece.box, strict=True)
    ]
    place = into[tuple(slice(part.start - side.start, part.stop - side.start)
                       for part, side in zip(shared, piece.box, strict=True))]  # fmt: skip
    skipped, shape = 0, chunk.sizes
    if shared:
        skipped, shape = shared[0].start - chunk.offsets[0], (len(shared[0]), *chunk.sizes[1:])
    kind: torch.dtype = getattr(torch, dtype)
    straight = (
        place.is_contiguous() and tuple(place.shape) == shape and place.dtype == kind and place.device.type == "cpu"
    )
    rows = place if straight else torch.empty(shape, dtype=kind)
    stream.fill(raw(rows), start + skipped * math.prod(chunk.sizes[1:]) * kind.itemsize, beat)
    if not straight:
        inner = [
            slice(part.start - first, part.stop - first) for part, first in zip(shared, chunk.offsets, strict=True)
        ]
        place.copy_(rows[(slice(None), *inner[1:])] if shared else rows)
