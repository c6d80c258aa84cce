"""Sharding: the block of every parameter on a tp or ep rank.

Pure arithmetic, evaluated by the ranks that hold the shards and by the planner that counts them.
"""

import math
from dataclasses import dataclass
from typing import Literal

from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter

Box = tuple[range, ...]  # a block of a tensor: the range of indices along each dimension


@dataclass(frozen=True)
class TensorShard:
    """How one parameter is sharded over the tp axis, or over the ep axis if it belongs to experts."""

    dim: int | None  # the sharded dimension; None: every rank holds all of it
    partial: bool = False  # each rank's gradient is a summand: the whole is the sum over tp
    axis: Literal["tp", "ep"] = "tp"


def chunk(length: int, parts: int, index: int) -> range:
    """Part `index` of `length` elements, by torch.chunk's rule: only the last parts are shorter than the first."""
    size = -(-length // parts)
    return range(min(length, index * size), min(length, (index + 1) * size))


def tensor_shard(parameter: Parameter, spec: ModelSpec, layout: Layout) -> TensorShard:
    """How a parameter is sharded in a layout, by its tensor-parallel rule."""
    match parameter.tp:
        case "colwise":
            return TensorShard(parameter.row_dim)
        case "rowwise":
            return TensorShard(parameter.row_dim + 1)
        case "colwise_kv" if spec.kv_heads % layout.tp == 0:
            return TensorShard(parameter.row_dim)
        case "colwise_kv":  # fewer kv heads than ranks: several ranks use one head, and their gradients are summed
            return TensorShard(None, partial=True)
        case "per_head" | "replicated_partial":
            return TensorShard(None, partial=layout.tp > 1)
        case "experts":  # whole ones: their number divides by ep
            return TensorShard(0, axis="ep")
    return TensorShard(None, partial=layout.sp)  # under sp each rank has the gradient of its own tokens only


def kv_head(spec: ModelSpec, layout: Layout, rank: int) -> range:
    """The kv heads that tp rank `rank` uses."""
    if spec.kv_heads % layout.tp == 0:
        return chunk(spec.kv_heads, layout.tp, rank)
    head = rank * spec.kv_heads // layout.tp
    return range(head, head + 1)


@dataclass(frozen=True)
class LocalParam:
    """The box of a parameter that one tp rank, or ep rank, holds. ZeRO shards the box's first dimension."""

    parameter: Parameter
    tp: TensorShard
    box: Box

    @classmethod
    def of(cls, parameter: Parameter, shard: TensorShard, parts: int, rank: int) -> "LocalParam":
        """The box of rank `rank`, of the `parts` ranks that share the parameter."""
        sides = enumerate(parameter.shape)
        box = tuple(chunk(size, parts, rank) if dim == shard.dim else range(size) for dim, size in sides)
        return cls(parameter, shard, box)

    @property
    def fsdp_axis(self) -> Literal["fsdp", "efsdp"]:
        """The axis that ZeRO shards it over."""
        return "efsdp" if self.parameter.experts else "fsdp"

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.box))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def share(self, parts: int, index: int) -> Box:
        """The box that ZeRO gives to rank `index` of `parts`, in indices of the full parameter."""
        first, *rest = self.box
        own = chunk(len(first), parts, index)
        return first[own.start : own.stop], *rest

    def share_size(self, parts: int) -> int:
        """Elements of the largest share, to which the others are padded."""
        return math.prod(map(len, self.share(parts, 0)))


def local_params(spec: ModelSpec, layout: Layout, tp_rank: int = 0, ep_rank: int = 0) -> dict[str, LocalParam]:
    """The box of every parameter of the model that the rank at these positions along tp and ep holds."""
    ranks = {"tp": (layout.tp, tp_rank), "ep": (layout.ep, ep_rank)}
    shards = ((parameter, tensor_shard(parameter, spec, layout)) for parameter in spec.parameters())
    return {parameter.name: LocalParam.of(parameter, shard, *ranks[shard.axis]) for parameter, shard in shards}
