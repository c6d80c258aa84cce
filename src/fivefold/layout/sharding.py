"""Sharding: the block of every parameter on a tp or ep rank, and the parameters of a bucket.

Pure arithmetic, evaluated by the ranks that hold the shards and by the planner that counts them.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import EMBEDDING_UNIT, HEAD_UNIT, Parameter

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


SLICE = 2**28  # logits held at a time, about: half a GiB in bfloat16, and enough rows for a matmul to run at full speed
TILE = 256  # rows of a matmul's tile


def slices(tokens: int, words: int) -> list[range]:
    """Slices of the tokens whose logits, over `words` words, are held at a time: whole tiles, as even as possible."""
    tiles, parts = -(-tokens // TILE), max(1, round(tokens * words / SLICE))
    rows = (chunk(tiles, parts, index) for index in range(parts))
    return [range(part.start * TILE, min(part.stop * TILE, tokens)) for part in rows if len(part)] or [range(0)]


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


# ---- buckets --------------------------------------------------------------------------------------------------------
# Buckets: which parameters' gradients are reduced together, and in which order.
#
#     for bucket in buckets(local_params(spec, layout).values()):
#         bucket.names, bucket.partial, bucket.size(), bucket.padded(4)
#
# A decoder's backward pass finishes its units one by one: the head unit (last norm, head), the blocks from the last to
# the first, the embedding unit. Consecutive units are joined until a bucket is large enough for a collective.
# Parameters whose gradient must also be summed over tp have buckets of their own: only they take part in that sum.


# Of a bucket: sending 16 MiB of float32 takes far longer than starting the collective.
MIN_BUCKET_ELEMENTS = 1 << 22


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


@dataclass(frozen=True)
class BucketParams:
    """The parameters of one bucket, and the units of the decoder that they come from."""

    params: tuple[LocalParam, ...]
    units: tuple[int, ...]  # in the order in which backward finishes them
    partial: bool  # gradients are also summed over tp
    deferred: bool = False  # gradients come from separate weight-gradient passes (W)
    tied: bool = False  # gradients are also summed over the first and last pipeline stage
    experts: bool = False  # sharded over efsdp, the ranks that have the same experts
    full_precision: bool = False  # new weights are gathered in full precision

    @property
    def fsdp_axis(self) -> Literal["fsdp", "efsdp"]:
        return self.params[0].fsdp_axis

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.params)

    def size(self) -> int:
        return sum(param.size for param in self.params)

    def padded(self, parts: int) -> int:
        """Elements of the buffer of a reduce-scatter or all-gather over `parts` ranks: shares padded to the largest."""
        return parts * sum(param.share_size(parts) for param in self.params)


def buckets(
    parameters: Iterable[LocalParam],
    min_elements: int = MIN_BUCKET_ELEMENTS,
    split_backward: bool = False,
    separate_tied: bool = False,
    low_precision: bool = False,
) -> list[BucketParams]:
    """The buckets, in the order in which backward completes them. Forward needs them in the opposite order.

    Separate buckets are made for linears, if the schedule computes their gradients in separate passes
    (`split_backward`); for tied parameters, if another pipeline rank has a copy (`separate_tied`); for experts, which
    are sharded over another axis; for full-precision parameters, if the others are gathered in `low_precision`.
    """

    def kind_of(param: LocalParam) -> tuple[bool, ...]:
        parameter = param.parameter
        return (
            param.tp.partial,
            split_backward and parameter.deferred,
            separate_tied and parameter.tied,
            parameter.experts > 0,
            low_precision and parameter.full_precision,
        )

    units: dict[int, list[LocalParam]] = {}
    for param in parameters:
        units.setdefault(param.parameter.unit, []).append(param)
    order = sorted(units, reverse=True)
    groups: list[BucketParams] = []
    for kind in product((False, True), repeat=5):
        chosen = {unit: [param for param in units[unit] if kind_of(param) == kind] for unit in order}
        groups += [BucketParams(params, of_units, *kind) for params, of_units in _join(chosen, min_elements)]
    return sorted(groups, key=lambda group: -group.units[-1])


def _join(
    units: dict[int, list[LocalParam]], min_elements: int
) -> Iterator[tuple[tuple[LocalParam, ...], tuple[int, ...]]]:
    """The parameters of consecutive units, as many as it takes to have `min_elements` elements, and those units."""
    joined_units: list[int] = []
    joined: list[LocalParam] = []
    for unit, params in units.items():
        if params:
            joined_units.append(unit)
            joined += params
        if sum(param.size for param in joined) >= min_elements:
            yield tuple(joined), tuple(joined_units)
            joined_units, joined = [], []
    if joined:
        yield tuple(joined), tuple(joined_units)


def layers_of(units: Iterable[int]) -> list[int]:
    """The layers among `units`, first to last."""
    return sorted(unit for unit in set(units) if EMBEDDING_UNIT < unit < HEAD_UNIT)
