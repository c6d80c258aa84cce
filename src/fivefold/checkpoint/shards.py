"""The shards of a rank: boxes of tensors with global names. One layout writes its shards, another reads its own;
`load.py` finds the overlaps.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.checkpoint.manifest import Checkpoint
from fivefold.checkpoint.tensors import MODEL, Chunk, Stored, model_key
from fivefold.layout.sharding import Box
from fivefold.parallel.optimizer import Optimizer
from fivefold.parallel.weights import Weights


@dataclass(frozen=True)
class Shard:
    """A box of a tensor. `make` returns its values; called when they are written, it may read them from a file."""

    shape: tuple[int, ...]  # of the full tensor
    box: Box
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor, shape: tuple[int, ...], box: Box) -> "Shard":
        return cls(shape, box, tensor.dtype, lambda: tensor)

    @classmethod
    def whole(cls, tensor: Tensor) -> "Shard":
        return cls.of(tensor, tuple(tensor.shape), tuple(range(size) for size in tensor.shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(side) for side in self.box)

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    def stored(self, file: str, start: int) -> Stored:
        """The table entry of this box alone, with its values in `file` from byte `start` on."""
        chunk = Chunk(tuple(side.start for side in self.box), self.sizes, file, start, self.nbytes)
        return Stored(tuple(self.shape), dtype_name(self.dtype), (chunk,))


Shards = Mapping[str, Shard]


def raw(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# A trainer's state: masters, the optimizer's states and the model's buffers by global name. The model's own weights are
# not saved: they are computed from the masters.
Shapes = Mapping[str, tuple[int, ...]]  # of every parameter of the model
Buffers = Mapping[str, Tensor]  # of this rank's stages, each in full


def saveable_tensors(
    weights: Weights, shapes: Shapes, optimizer: Optimizer | None, buffers: Buffers | None = None
) -> dict[str, Shard]:
    """This rank's tensors that go into checkpoints, as shards that share their memory."""
    return _shards(weights.masters, weights, shapes, optimizer) | _full(buffers or {})


def stored_buffers(buffers: Buffers, checkpoint: Checkpoint) -> Buffers:
    """The buffers that a checkpoint has; imported weights may have none."""
    return {name: buffer for name, buffer in buffers.items() if model_key(name) in checkpoint.tensors}


def shards_to_write(weights: Weights, shapes: Shapes, optimizer: Optimizer, buffers: Buffers) -> dict[str, Shard]:
    """The shards that this rank writes: replicas take turns, parameter by parameter."""
    names = []
    for number, name in enumerate(shapes):
        if name in weights.masters:
            replica, replicas = weights.copies(name)  # the number of this one, and how many there are
            if number % replicas == replica:
                names.append(name)
    first = weights.mesh.layout.position("stage", weights.mesh.world.rank) == 0  # of the ranks with these layers
    return _shards(names, weights, shapes, optimizer) | _full(buffers if first else {})


def _full(buffers: Buffers) -> dict[str, Shard]:
    return {model_key(name): Shard.whole(buffer) for name, buffer in buffers.items()}


def _shards(names: Iterable[str], weights: Weights, shapes: Shapes, optimizer: Optimizer | None) -> dict[str, Shard]:
    shards = {}
    for name in names:
        states = optimizer.states[name] if optimizer is not None else {}
        for kind, tensor in ({MODEL: weights.masters[name].detach()} | states).items():
            if tensor.numel():
                shards[f"{kind}.{name}"] = Shard.of(tensor, shapes[name], weights.master_box(name))
    return shards
