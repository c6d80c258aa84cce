"""Loading: the newest checkpoint that is what its manifest says, into the ranks of any layout."""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.shards import Pieces, Shard, raw
from fivefold.checkpoint.storage import FileReader
from fivefold.checkpoint.store import Checkpoint, Damaged, Store
from fivefold.checkpoint.tensors import Chunk, model_key
from fivefold.launch import faults
from fivefold.launch.heartbeat import beat, enter
from fivefold.launch.host import for_files, side_by_side
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import Box, local_params
from fivefold.layout.stages import stages_of
from fivefold.parallel.control import Control
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.files import Progress
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
        chosen = _candidate(store, bad, say, usable) if control.rank == 0 else (None, [])
        name, refusal = control.broadcast_value(chosen, tuple[str | None, list[str]])
        if refusal:
            raise UserError(refusal if control.rank == 0 else [], "checkpoint.refused")
        if name is None:
            return None
        checkpoint = Checkpoint(store.directory / name)
        enter(f"the reading of {name}")
        if faults.strike("read") == "flip" and not bad:
            _flip(checkpoint)
        problems = damage(checkpoint, control)
        if not problems:
            return checkpoint
        bad.add(checkpoint.path)
        if control.rank == 0:
            for problem in problems:
                say(problem)
            aside = set_aside(store, checkpoint.path, "damaged")
            say(f"skipping {name} ({aside}); trying the previous checkpoint")


def damage(checkpoint: Checkpoint, control: Control) -> list[str]:
    """Collective: what is not as the manifest says; each rank hashes a share. What must not be touched is refused."""
    shares = control.all_gather_values(_share(checkpoint, control), tuple[list[str], list[str]])
    if refusal := _all(refused for _, refused in shares):
        raise UserError(refusal if control.rank == 0 else [], "checkpoint.refused")
    return _all(damaged for damaged, _ in shares)


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
        newest = next((saved for saved in store.complete() if saved.path not in bad and usable(saved)), None)
    except OSError as error:
        return None, [f"cannot list {store.directory}: {error.strerror or error}"]
    if newest is not None:
        return newest.path.name, []
    fresh = "--fresh starts over in a new directory"
    return None, [f"none of the {len(bad)} checkpoints in {store.directory} is good; {fresh}"] if bad else []


def _share(checkpoint: Checkpoint, control: Control) -> tuple[list[str], list[str]]:
    """What is damaged in this rank's share of the files, and why a checkpoint must not be touched."""
    try:
        return checkpoint.damage(checkpoint.manifest.files[control.rank :: control.size], beat), []
    except Damaged as error:
        return error.problems, []
    except UserError as error:
        return [], error.problems


def _flip(checkpoint: Checkpoint) -> None:
    """A planted fault: one bit of its largest file."""
    path = Path(str(checkpoint.path), max(checkpoint.manifest.files, key=lambda file: file.bytes).name)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


class RowOverlap(NamedTuple):
    """The rows of a stored chunk in which it overlaps a piece that a rank wants. They lie together."""

    start: int  # the first byte of the rows in the chunk's file
    chunk: Chunk
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the rows
    inner: tuple[slice, ...]  # which part of them is wanted
    place: Tensor  # for that part

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def straight(self) -> bool:
        """Whether the rows may be read right into their place."""
        place = self.place
        same = place.is_contiguous() and tuple(place.shape) == self.shape and place.dtype == self.dtype
        return same and place.device.type == "cpu"

    @torch.no_grad()
    def put(self, rows: Tensor) -> None:
        self.place.copy_(rows[self.inner])

    def read(self, stream: FileReader) -> None:
        rows = self.place.detach() if self.straight else torch.empty(self.shape, dtype=self.dtype)
        stream.fill(raw(rows), self.start, beat)
        if not self.straight:
            self.put(rows)


def overlaps(checkpoint: Checkpoint, pieces: Pieces) -> dict[str, list[RowOverlap]]:
    """What a rank wants of each file, in the order of its bytes."""
    todo: dict[str, list[RowOverlap]] = {}
    for name, piece in pieces.items():
        stored = checkpoint.tensors.get(name)
        if stored is None or stored.shape != tuple(piece.shape):
            has = f"has {name} of shape {list(stored.shape)}" if stored else f"has no tensor {name}"
            raise UserError(f"{checkpoint.path} {has} (expected shape {list(piece.shape)})", "checkpoint.tensor")
        into, dtype = piece.make(), getattr(torch, stored.dtype)
        for chunk in stored.chunks:
            if overlap := _overlap(chunk, dtype, piece, into):
                todo.setdefault(chunk.file, []).append(overlap)
    return {file: sorted(wanted, key=lambda overlap: overlap.chunk.start) for file, wanted in todo.items()}


def _overlap(chunk: Chunk, dtype: torch.dtype, piece: Shard, into: Tensor) -> RowOverlap | None:
    shared = [
        range(max(first, side.start), min(first + size, side.stop))
        for first, size, side in zip(chunk.offsets, chunk.sizes, piece.box, strict=True)
    ]
    if not all(shared):
        return None
    place = into[tuple(slice(part.start - side.start, part.stop - side.start)
                       for part, side in zip(shared, piece.box, strict=True))]  # fmt: skip
    if not shared:
        return RowOverlap(chunk.start, chunk, dtype, (), (), place)
    skipped = (shared[0].start - chunk.offsets[0]) * math.prod(chunk.sizes[1:]) * dtype.itemsize
    inner = (
        slice(part.start - first, part.stop - first) for part, first in zip(shared[1:], chunk.offsets[1:], strict=True)
    )
    shape = (len(shared[0]), *chunk.sizes[1:])
    return RowOverlap(chunk.start + skipped, chunk, dtype, shape, (slice(None), *inner), place)


def load(checkpoint: Checkpoint, pieces: Pieces) -> None:
    """Fill the pieces' memory; each rank reads what it needs, and no rank waits for another."""
    todo = overlaps(checkpoint, pieces)

    def read(file: str) -> None:
        with checkpoint.storage.open(checkpoint.path / file) as stream:
            for overlap in todo[file]:
                overlap.read(stream)

    try:
        side_by_side(read, list(todo), for_files())
    except OSError as error:
        raise UserError(f"cannot read {checkpoint.path}: {error.strerror or error}", "file.read") from None


# ---- reshard --------------------------------------------------------------------------------------------------------
# A checkpoint in the pieces of another layout. Any layout reads any checkpoint; files cut as it reads them are read
# once each, and by one rank.


def reshard(
    checkpoint: Checkpoint, spec: ModelSpec, layout: Layout, seq: int, store: Store, progress: Progress
) -> Place:
    """The same state, written to `store` as the ranks of `layout` would."""
    manifest = checkpoint.manifest
    job = manifest.job | {"layout": msgspec.to_builtins(layout)}
    dtype = torch.float64 if job["train"]["dtype"] == "float64" else torch.float32
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    keys: dict[str, list[str]] = defaultdict(list)  # by parameter: its master, and the optimizer's states
    for key in checkpoint.tensors:
        keys[key.partition(".")[2]].append(key)
    parts: list[dict[str, Shard]] = [
        {key: _lazy(checkpoint, key, shapes[name], box, dtype) for name, box in boxes.items() for key in keys[name]}
        for boxes in boxes_of(spec, layout, seq)
    ]
    for name, shape in spec.buffers().items():  # small, and whole wherever they are
        if (key := model_key(name)) in checkpoint.tensors:
            parts[0][key] = _lazy(checkpoint, key, shape, tuple(map(range, shape)), dtype)
    return write_alone(store, parts, msgspec.structs.replace(manifest, job=job, files=[]), progress)


def boxes_of(spec: ModelSpec, layout: Layout, seq: int) -> list[dict[str, Box]]:
    """By rank of the layout, what it would write: each element of the model once."""
    stages, owner = stages_of(spec, layout, seq), layout.placement.owner
    boxes: list[dict[str, Box]] = []
    taken: set[tuple[str, Box]] = set()
    for rank in range(layout.world):
        pp, tp, ep = (layout.position(axis, rank) for axis in ("pp", "tp", "ep"))
        shares = {axis: (layout.size(axis), layout.position(axis, rank)) for axis in ("fsdp", "efsdp")}
        here = [stage for stage in stages if owner[stage.index] == pp]
        local: dict[str, Box] = {}
        for name, shard in local_params(spec, layout, tp, ep).items():
            box = shard.share(*shares[shard.fsdp_axis]) if layout.zero else shard.box
            holds = any(stage.holds(shard.parameter) for stage in here)
            if holds and all(map(len, box)) and (name, box) not in taken:
                taken.add((name, box))
                local[name] = box
        boxes.append(local)
    return boxes


def _lazy(checkpoint: Checkpoint, key: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> Shard:
    def make() -> Tensor:
        tensor = torch.empty([len(side) for side in box], dtype=dtype)
        load(checkpoint, {key: Shard.of(tensor, shape, box)})
        return tensor

    return Shard(shape, box, dtype, make)
