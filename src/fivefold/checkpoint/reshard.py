"""A checkpoint in the pieces of another layout. Any layout reads any checkpoint; files cut as it reads them are read
once each, and by one rank."""

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from fivefold.buckets import held
from fivefold.checkpoint.load import load
from fivefold.checkpoint.pieces import Box, Piece, Pieces
from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.state import model_key
from fivefold.checkpoint.store import Checkpoint, Progress, Store
from fivefold.layout import Layout
from fivefold.schedule.catalogue import placement
from fivefold.spec import ModelSpec
from fivefold.stages import stages_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


def reshard(
    checkpoint: Checkpoint, spec: ModelSpec, layout: Layout, seq: int, store: Store, progress: Progress
) -> Path:
    """The same state, written to `store` as the ranks of `layout` would."""
    manifest = checkpoint.manifest
    job = manifest.job | {"layout": msgspec.to_builtins(layout)}
    keys: list[Callable[[str], str]] = [model_key]
    if manifest.optimizer:
        keys += [lambda name, moment=moment: f"{moment}.{name}" for moment in _MOMENTS]  # type: ignore[misc]
    dtype = torch.float64 if job["train"]["dtype"] == "float64" else torch.float32
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    parts: list[Pieces] = [
        {
            key(name): _lazy(checkpoint, key(name), shapes[name], box, dtype)
            for name, box in boxes.items()
            for key in keys
        }
        for boxes in boxes_of(spec, layout, seq)
    ]
    return write_alone(store, parts, msgspec.structs.replace(manifest, job=job, files=[]), progress)


def boxes_of(spec: ModelSpec, layout: Layout, seq: int) -> list[dict[str, Box]]:
    """By rank of the layout, what it would write: each element of the model once."""
    stages, owner = stages_of(spec, layout, seq), placement(layout.schedule, layout.pp, layout.chunks).owner
    zero = layout.dp // layout.replicate * layout.cp if layout.zero else 1
    boxes: list[dict[str, Box]] = []
    taken: set[tuple[str, Box]] = set()
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        shard = (at["dp"] % (layout.dp // layout.replicate)) * layout.cp + at["cp"] if layout.zero else 0
        mine: dict[str, Box] = {}
        names = {name for stage in stages if owner[stage.index] == at["pp"] for name in stage.names(spec)}
        for name, one in held(spec, layout, at["tp"]).items():
            if name not in names:
                continue
            rows = one.share(zero, shard)
            box: Box = (rows,) if one.columns is None else (rows, one.columns)
            if all(map(len, box)) and (name, box) not in taken:
                taken.add((name, box))
                mine[name] = box
        boxes.append(mine)
    return boxes


def _lazy(checkpoint: Checkpoint, key: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> Piece:
    def make() -> Tensor:
        tensor = torch.empty([len(side) for side in box], dtype=dtype)
        load(checkpoint, {key: Piece.of(tensor, shape, box)})
        return tensor

    assert math.prod(map(len, box))
    return Piece(torch.Size(shape), box, dtype, make)
