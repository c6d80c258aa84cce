"""A checkpoint in the pieces of another layout. Any layout reads any checkpoint; files cut as it reads them are read
once each, and by one rank."""

import msgspec
import torch
from torch import Tensor

from fivefold.checkpoint.load import load
from fivefold.checkpoint.pieces import Piece
from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.state import keys
from fivefold.checkpoint.store import Checkpoint, Store
from fivefold.checkpoint.tensors import model_key
from fivefold.layout.buckets import held
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import Box
from fivefold.layout.stages import stages_of
from fivefold.spec.model import ModelSpec
from fivefold.support.files import Progress
from fivefold.support.places import Place


def reshard(
    checkpoint: Checkpoint, spec: ModelSpec, layout: Layout, seq: int, store: Store, progress: Progress
) -> Place:
    """The same state, written to `store` as the ranks of `layout` would."""
    manifest = checkpoint.manifest
    job = manifest.job | {"layout": msgspec.to_builtins(layout)}
    dtype = torch.float64 if job["train"]["dtype"] == "float64" else torch.float32
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    parts: list[dict[str, Piece]] = [
        {
            key: _lazy(checkpoint, key, shapes[name], box, dtype)
            for name, box in boxes.items()
            for key in keys(name, manifest)
        }
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
        shares = {axis: (layout.size(axis), layout.position(axis, rank)) for axis in ("zero", "ezero")}
        here = [stage for stage in stages if owner[stage.index] == pp]
        mine: dict[str, Box] = {}
        for name, one in held(spec, layout, tp, ep).items():
            box = one.share(*shares[one.zero_axis]) if layout.zero else one.box
            holds = any(stage.holds(one.parameter) for stage in here)
            if holds and all(map(len, box)) and (name, box) not in taken:
                taken.add((name, box))
                mine[name] = box
        boxes.append(mine)
    return boxes


def _lazy(checkpoint: Checkpoint, key: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> Piece:
    def make() -> Tensor:
        tensor = torch.empty([len(side) for side in box], dtype=dtype)
        load(checkpoint, {key: Piece.of(tensor, shape, box)})
        return tensor

    return Piece(shape, box, dtype, make)
