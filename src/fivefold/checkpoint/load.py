"""Loads checkpoints: finds the newest that is undamaged, and reads it into the ranks of any layout."""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.checkpoint.manifest import Checkpoint, Damaged
from fivefold.checkpoint.retention import prune
from fivefold.checkpoint.shards import Shard, Shards, raw
from fivefold.checkpoint.storage import FileReader
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.tensors import Chunk
from fivefold.launch import faults
from fivefold.launch.heartbeat import beat, enter
from fivefold.launch.host import for_files, side_by_side
from fivefold.parallel.control import Control
from fivefold.support.errors import UserError
from fivefold.support.storage_place import Place

Say = Callable[[str], None]


def newest(
    store: Store, control: Control, say: Say, usable: Callable[[Checkpoint], bool] = lambda _: True
) -> Checkpoint | None:
    """The newest complete checkpoint that is `usable` and undamaged; None if there is no checkpoint. Collective.

    Each rank hashes a share of the files. An incomplete or damaged checkpoint is set aside, with a note, and the one
    before it is tried. Raises UserError if one cannot be opened, or is of another release, and leaves it where it is;
    also if all are damaged.
    """
    bad: set[Place] = set()
    while True:
        candidate = _candidate(store, bad, say, usable) if control.rank == 0 else (None, [])
        name, refusal = control.broadcast_value(candidate, tuple[str | None, list[str]])
        if refusal:
            raise UserError(refusal if control.rank == 0 else [], "checkpoint.refused")
        if name is None:
            return None
        checkpoint = Checkpoint(store.directory / name)
        enter(f"the reading of {name}")
        if faults.strike("read") == "flip" and not bad:
            _flip_bit(checkpoint)
        problems = damage(checkpoint, control)
        if not problems:
            return checkpoint
        bad.add(checkpoint.path)
        if control.rank == 0:
            for problem in problems:
                say(problem)
            outcome = set_aside(store, checkpoint.path, "damaged")
            say(f"skipping {name} ({outcome}); trying the previous checkpoint")


def damage(checkpoint: Checkpoint, control: Control) -> list[str]:
    """The problems of damaged files, on all ranks; each rank hashes a share of the files. Collective.

    Raises UserError where files cannot be read, or are of another release.
    """
    shares = control.all_gather_values(_damage_of_share(checkpoint, control), tuple[list[str], list[str]])
    if refusal := _distinct(refused for _, refused in shares):
        raise UserError(refusal if control.rank == 0 else [], "checkpoint.refused")
    return _distinct(damaged for damaged, _ in shares)


def _distinct(lists: Iterable[list[str]]) -> list[str]:
    """Every sentence of the lists once."""
    return list(dict.fromkeys(sentence for sentences in lists for sentence in sentences))


def set_aside(store: Store, path: Place, how: str) -> str:
    """Renames a checkpoint to NAME.HOW, and returns the outcome as a text."""
    try:
        return f"set aside as {store.set_aside(path, how).name}"
    except OSError as error:
        return f"stays where it is: {error.strerror}"


def _candidate(
    store: Store, bad: set[Place], say: Say, usable: Callable[[Checkpoint], bool]
) -> tuple[str | None, list[str]]:
    """(name of the newest usable checkpoint not in `bad`, or None; why the run must not resume, else [])."""
    try:
        for path in store.incomplete() if not bad else ():
            say(f"{path.name} was never finished; {set_aside(store, path, 'incomplete')}")
        prune(store)
        newest = next((saved for saved in store.complete() if saved.path not in bad and usable(saved)), None)
    except OSError as error:
        return None, [f"cannot list {store.directory}: {error.strerror or error}"]
    if newest is not None:
        return newest.path.name, []
    fresh = "--fresh starts over in a new directory"
    return None, [f"none of the {len(bad)} checkpoints in {store.directory} is good; {fresh}"] if bad else []


def _damage_of_share(checkpoint: Checkpoint, control: Control) -> tuple[list[str], list[str]]:
    """(problems of damaged files in this rank's share, reasons why the checkpoint must be left where it is)."""
    try:
        return checkpoint.damage(checkpoint.manifest.files[control.rank :: control.size], beat), []
    except Damaged as error:
        return error.problems, []
    except UserError as error:
        return [], error.problems


def _flip_bit(checkpoint: Checkpoint) -> None:
    """Flips one bit of the largest file, for FIVEFOLD_FAULT."""
    path = Path(str(checkpoint.path), max(checkpoint.manifest.files, key=lambda file: file.bytes).name)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


class RowOverlap(NamedTuple):
    """Consecutive rows of a stored chunk that overlap a shard which a rank loads."""

    start: int  # the first byte of the rows in the chunk's file
    chunk: Chunk
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the rows
    inner: tuple[slice, ...]  # the part of the rows that the shard has
    destination: Tensor  # the part of the shard that they are copied to

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Whether the bytes can be read directly into the destination."""
        to = self.destination
        return (
            to.is_contiguous() and tuple(to.shape) == self.shape and to.dtype == self.dtype and to.device.type == "cpu"
        )

    @torch.no_grad()
    def put(self, rows: Tensor) -> None:
        self.destination.copy_(rows[self.inner])

    def read(self, stream: FileReader) -> None:
        rows = self.destination.detach() if self.in_place else torch.empty(self.shape, dtype=self.dtype)
        stream.fill(raw(rows), self.start, beat)
        if not self.in_place:
            self.put(rows)


def overlaps(checkpoint: Checkpoint, shards: Shards) -> dict[str, list[RowOverlap]]:
    """The overlaps of a rank's shards with the stored chunks, by file, in the order of its bytes."""
    by_file: dict[str, list[RowOverlap]] = {}
    for name, shard in shards.items():
        stored = checkpoint.tensors.get(name)
        if stored is None or stored.shape != tuple(shard.shape):
            has = f"has {name} of shape {list(stored.shape)}" if stored else f"has no tensor {name}"
            raise UserError(f"{checkpoint.path} {has} (expected shape {list(shard.shape)})", "checkpoint.tensor")
        into, dtype = shard.make(), getattr(torch, stored.dtype)
        for chunk in stored.chunks:
            if overlap := _overlap(chunk, dtype, shard, into):
                by_file.setdefault(chunk.file, []).append(overlap)
    return {file: sorted(rows, key=lambda overlap: overlap.chunk.start) for file, rows in by_file.items()}


def _overlap(chunk: Chunk, dtype: torch.dtype, shard: Shard, into: Tensor) -> RowOverlap | None:
    shared = [
        range(max(first, side.start), min(first + size, side.stop))
        for first, size, side in zip(chunk.offsets, chunk.sizes, shard.box, strict=True)
    ]
    if not all(shared):
        return None
    destination = into[tuple(slice(part.start - side.start, part.stop - side.start)
                       for part, side in zip(shared, shard.box, strict=True))]  # fmt: skip
    if not shared:  # a scalar
        return RowOverlap(chunk.start, chunk, dtype, (), (), destination)
    skipped = (shared[0].start - chunk.offsets[0]) * math.prod(chunk.sizes[1:]) * dtype.itemsize
    inner = (
        slice(part.start - first, part.stop - first) for part, first in zip(shared[1:], chunk.offsets[1:], strict=True)
    )
    shape = (len(shared[0]), *chunk.sizes[1:])
    return RowOverlap(chunk.start + skipped, chunk, dtype, shape, (slice(None), *inner), destination)


def load(checkpoint: Checkpoint, shards: Shards) -> None:
    """Reads the shards' values from a checkpoint; not collective."""
    by_file = overlaps(checkpoint, shards)

    def read(file: str) -> None:
        with checkpoint.storage.open(checkpoint.path / file) as stream:
            for overlap in by_file[file]:
                overlap.read(stream)

    try:
        side_by_side(read, list(by_file), for_files())
    except OSError as error:
        raise UserError(f"cannot read {checkpoint.path}: {error.strerror or error}", "file.read") from None
