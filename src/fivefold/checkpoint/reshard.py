"""Writes a checkpoint with the shards of another layout.

Any layout reads any checkpoint; but of one that was written with its own shards each file is read once, by one rank.
"""

from collections import defaultdict

import msgspec
import torch
from torch import Tensor

from fivefold.checkpoint.load import load
from fivefold.checkpoint.manifest import Checkpoint
from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.shards import Shard
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.tensors import model_key
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import Box, local_params
from fivefold.layout.stages import stages_of
from fivefold.spec.model import ModelSpec
from fivefold.support.files import Progress
from fivefold.support.storage_place import Place


def reshard(
    checkpoint: Checkpoint, spec: ModelSpec, layout: Layout, seq: int, store: Store, progress: Progress
) -> Place:
    """Writes the same state to `store`, as the ranks of `layout` would, and returns the new checkpoint's path."""
    manifest = checkpoint.manifest
    job = manifest.job | {"layout": msgspec.to_builtins(layout)}
    dtype = torch.float64 if job["train"]["dtype"] == "float64" else torch.float32
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters()}
    keys: dict[str, list[str]] = defaultdict(list)  # by parameter: its master, and the optimizer's states
    for key in checkpoint.tensors:
        keys[key.partition(".")[2]].append(key)
    parts: list[dict[str, Shard]] = [
        {
            key: _lazy_shard(checkpoint, key, shapes[name], box, dtype)
            for name, box in boxes.items()
            for key in keys[name]
        }
        for boxes in boxes_of(spec, layout, seq)
    ]
    for name, shape in spec.buffers().items():  # small, and never sharded
        if (key := model_key(name)) in checkpoint.tensors:
            parts[0][key] = _lazy_shard(checkpoint, key, shape, tuple(map(range, shape)), dtype)
    return write_alone(store, parts, msgspec.structs.replace(manifest, job=job, files=[]), progress)


def boxes_of(spec: ModelSpec, layout: Layout, seq: int) -> list[dict[str, Box]]:
    """{parameter: box} that each rank of the layout would write, by rank: each element of the model once."""
    stages, owner = stages_of(spec, layout, seq), layout.placement.owner
    boxes: list[dict[str, Box]] = []
    taken: set[tuple[str, Box]] = set()
    for rank in range(layout.world):
        pp, tp, ep = (layout.position(axis, rank) for axis in ("pp", "tp", "ep"))
        shares = {axis: (layout.size(axis), layout.position(axis, rank)) for axis in ("fsdp", "efsdp")}
        local_stages = [stage for stage in stages if owner[stage.index] == pp]
        local: dict[str, Box] = {}
        for name, shard in local_params(spec, layout, tp, ep).items():
            box = shard.share(*shares[shard.fsdp_axis]) if layout.zero else shard.box
            on_rank = any(stage.holds(shard.parameter) for stage in local_stages)
            if on_rank and all(map(len, box)) and (name, box) not in taken:
                taken.add((name, box))
                local[name] = box
        boxes.append(local)
    return boxes


def _lazy_shard(checkpoint: Checkpoint, key: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> Shard:
    def make() -> Tensor:
        tensor = torch.empty([len(side) for side in box], dtype=dtype)
        load(checkpoint, {key: Shard.of(tensor, shape, box)})
        return tensor

    return Shard(shape, box, dtype, make)
