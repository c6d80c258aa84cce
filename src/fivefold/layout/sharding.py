"""Who holds what: the block of every parameter on a tp rank, and the tokens of a sequence on a cp rank.

Pure arithmetic, read by the ranks that hold the pieces and by the planner that counts them.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from fivefold.layout.layout import Layout
from fivefold.layout.rules import is_zigzag
from fivefold.layout.stages import Stage, stages_of
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import BOTTOM, TOP, Parameter

Box = tuple[range, ...]  # a part of a tensor: the indices along each dimension of the whole


@dataclass(frozen=True)
class TensorShard:
    """How one parameter lies over the tp axis; that of experts over the ep axis."""

    dim: int | None  # the dimension that is divided; None: every rank holds all of it
    partial: bool = False  # each rank's gradient is a summand: the whole is the sum over tp
    axis: Literal["tp", "ep"] = "tp"


def chunk(length: int, parts: int, index: int) -> range:
    """Part `index` of `length` things: torch.chunk's rule, so all parts have the first's length but the last ones."""
    size = -(-length // parts)
    return range(min(length, index * size), min(length, (index + 1) * size))


SLICE = 2**28  # logits at a time, about: half a GiB in bfloat16, and enough rows for a matmul to run at full pace
TILE = 256  # rows: those of a matmul's tiles


def slices(tokens: int, words: int) -> list[range]:
    """The tokens whose logits, over so many words, are held at a time: whole tiles of them, as even as these allow."""
    tiles, parts = -(-tokens // TILE), max(1, round(tokens * words / SLICE))
    rows = (chunk(tiles, parts, index) for index in range(parts))
    return [range(part.start * TILE, min(part.stop * TILE, tokens)) for part in rows if len(part)] or [range(0)]


def tensor_shard(parameter: Parameter, spec: ModelSpec, layout: Layout) -> TensorShard:
    """The parameter's rule, evaluated for a layout."""
    match parameter.tp:
        case "colwise":
            return TensorShard(parameter.row_dim)
        case "rowwise":
            return TensorShard(parameter.row_dim + 1)
        case "colwise_kv" if spec.kv_heads % layout.tp == 0:
            return TensorShard(parameter.row_dim)
        case "colwise_kv":  # fewer kv heads than ranks: several ranks use a head, and add to its gradient
            return TensorShard(None, partial=True)
        case "per_head" | "replicated_partial":
            return TensorShard(None, partial=layout.tp > 1)
        case "experts":  # whole ones: their number divides by ep
            return TensorShard(0, axis="ep")
    return TensorShard(None, partial=layout.sp)  # under sp a rank sees only its tokens


def kv_head(spec: ModelSpec, layout: Layout, rank: int) -> range:
    """The kv heads that tp rank `rank` works with."""
    if spec.kv_heads % layout.tp == 0:
        return chunk(spec.kv_heads, layout.tp, rank)
    head = rank * spec.kv_heads // layout.tp
    return range(head, head + 1)


def context_share(seq: int, layout: Layout, rank: int) -> list[range]:
    """The positions of a sequence that cp rank `rank` holds, in order; Ulysses divides the heads for attention, so its
    pieces can stay whole."""
    return zigzag_share(seq, layout.cp, rank) if is_zigzag(layout) else [chunk(seq, layout.cp, rank)]


def zigzag_share(seq: int, ranks: int, rank: int) -> list[range]:
    """One early piece and one late piece, which gives every rank the same number of causal scores."""
    pieces = 2 * ranks
    return [chunk(seq, pieces, rank), chunk(seq, pieces, pieces - 1 - rank)]


# ---- buckets --------------------------------------------------------------------------------------------------------
# Buckets: which parameters are reduced together, and in which order. Pure arithmetic, for the ranks and the planner.
#
#     for bucket in buckets(held(spec, layout).values()):
#         bucket.names, bucket.partial, bucket.size(), bucket.padded(4)
#
# A decoder's backward pass finishes its units one by one: the top (last norm, head), the blocks from the last to the
# first, the bottom (embeddings). Consecutive units join until a bucket is worth a collective of its own. Parameters
# whose gradient must also be summed over tp have buckets of their own, since only they take part in that sum.


MINIMUM = 1 << 22  # elements of a bucket: 16 MiB of float32 keep a link busy far longer than its start takes


@dataclass(frozen=True)
class LocalParam:
    """A parameter as one tp rank, or ep rank, holds it: a box of the whole. ZeRO divides the box's first dimension."""

    parameter: Parameter
    tp: TensorShard
    box: Box

    @classmethod
    def of(cls, parameter: Parameter, shard: TensorShard, parts: int, rank: int) -> "LocalParam":
        """On rank `rank` of the `parts` that share it."""
        sides = enumerate(parameter.shape)
        box = tuple(chunk(size, parts, rank) if dim == shard.dim else range(size) for dim, size in sides)
        return cls(parameter, shard, box)

    @property
    def fsdp_axis(self) -> Literal["fsdp", "efsdp"]:
        """The ranks that ZeRO divides it over."""
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
        """The part of the whole parameter that ZeRO gives to rank `index` of `parts`."""
        first, *rest = self.box
        own = chunk(len(first), parts, index)
        return first[own.start : own.stop], *rest

    def share_size(self, parts: int) -> int:
        """Elements of the largest share, to which the others are padded."""
        return math.prod(map(len, self.share(parts, 0)))


def held(spec: ModelSpec, layout: Layout, tp_rank: int = 0, ep_rank: int = 0) -> dict[str, LocalParam]:
    """Every parameter of the model, as the rank at these places of tp and ep holds it."""
    places = {"tp": (layout.tp, tp_rank), "ep": (layout.ep, ep_rank)}
    shards = ((parameter, tensor_shard(parameter, spec, layout)) for parameter in spec.parameters())
    return {parameter.name: LocalParam.of(parameter, shard, *places[shard.axis]) for parameter, shard in shards}


@dataclass(frozen=True)
class Grouping:
    """The parameters of one bucket, and the units of the decoder that they come from."""

    held: tuple[LocalParam, ...]
    units: tuple[int, ...]  # in the order in which backward finishes them
    partial: bool  # gradients are summed over tp too
    late: bool = False  # gradients come from weight-gradient passes of their own
    shared: bool = False  # gradients are summed over the two ends of the pipeline too
    experts: bool = False  # ZeRO divides these over the ranks that have the same experts
    exact: bool = False  # new weights travel in full precision

    @property
    def fsdp_axis(self) -> Literal["fsdp", "efsdp"]:
        return self.held[0].fsdp_axis

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.held)

    def size(self) -> int:
        return sum(param.size for param in self.held)

    def padded(self, parts: int) -> int:
        """Elements that a reduce-scatter or all-gather over `parts` ranks is handed: shares padded to the first."""
        return parts * sum(param.share_size(parts) for param in self.held)


def buckets(
    parameters: Iterable[LocalParam],
    minimum: int = MINIMUM,
    split: bool = False,
    shared: bool = False,
    narrow: bool = False,
) -> list[Grouping]:
    """The buckets, in the order in which backward completes them. Forward needs them in the opposite order.

    `split`: the schedule computes the gradients of linears apart from the rest, so they have buckets of their own; so
    have tied parameters that are `shared` with another rank, and experts, which other ranks hold. `narrow`: new weights
    travel rounded, and those that never are travel apart.
    """

    def kind_of(param: LocalParam) -> tuple[bool, ...]:
        of = param.parameter
        return param.tp.partial, split and of.deferred, shared and of.tied, of.experts > 0, narrow and of.exact

    units: dict[int, list[LocalParam]] = {}
    for param in parameters:
        units.setdefault(param.parameter.unit, []).append(param)
    order = sorted(units, reverse=True)
    groups: list[Grouping] = []
    for kind in product((False, True), repeat=5):
        chosen = {unit: [param for param in units[unit] if kind_of(param) == kind] for unit in order}
        groups += [Grouping(members, numbers, *kind) for members, numbers in _join(chosen, minimum)]
    return sorted(groups, key=lambda group: -group.units[-1])


def _join(units: dict[int, list[LocalParam]], minimum: int) -> Iterator[tuple[tuple[LocalParam, ...], tuple[int, ...]]]:
    """Consecutive units' parameters until they are enough, and those units."""
    numbers: list[int] = []
    members: list[LocalParam] = []
    for unit, params in units.items():
        if params:
            numbers.append(unit)
            members += params
        if sum(param.size for param in members) >= minimum:
            yield tuple(members), tuple(numbers)
            numbers, members = [], []
    if members:
        yield tuple(members), tuple(numbers)


def layers_of(units: Iterable[int]) -> list[int]:
    """The layers among `units`, first to last."""
    return sorted(unit for unit in set(units) if BOTTOM < unit < TOP)


# ---- part -----------------------------------------------------------------------------------------------------------
# A rank's part: which layers, heads, experts, tokens, sequences and shards it has.
#
# part_of(spec, Layout(dp=2, tp=4, pp=2), seq=4096, batch=64, rank=5).heads       # range(8, 16) of 32
#
# Each field is what the rank that trains would say: `stages`, `sharding` and `buckets` are asked, and nothing else.


class RankPart(NamedTuple):
    rank: int
    at: dict[str, int]  # its place along dp, pp, cp and tp
    stages: tuple[Stage, ...]
    heads: range
    kv_heads: range
    experts: range  # of each layer that has some
    positions: list[range]  # of every sequence
    sequences: range  # of the global batch
    parameters: int  # that it computes with
    own: int  # that it updates: its shard of them, under ZeRO

    @property
    def layers(self) -> list[int]:
        return [layer for stage in self.stages for layer in stage.layers]


def part_of(spec: ModelSpec, layout: Layout, seq: int, batch: int, rank: int) -> RankPart:
    at = {axis: layout.position(axis, rank) for axis in ("tp", "pp", "cp", "ep", "batch", "fsdp", "efsdp")}
    all_stages = stages_of(spec, layout, seq)
    stages = tuple(all_stages[number] for number in layout.placement.of_rank[at["pp"]])
    names = dict.fromkeys(name for stage in stages for name in stage.names(spec))  # a tied embedding once
    all_params = held(spec, layout, at["tp"], at["ep"])
    params = [all_params[name] for name in names]
    shards = [param.share(layout.size(param.fsdp_axis), at[param.fsdp_axis]) for param in params]
    count = sum(param.size for param in params)
    return RankPart(
        rank,
        layout.coordinates(rank),
        stages,
        chunk(spec.heads, layout.tp, at["tp"]),
        kv_head(spec, layout, at["tp"]),
        range(0) if spec.experts is None else chunk(spec.experts.count, layout.ep, at["ep"]),
        context_share(seq, layout, at["cp"]),
        chunk(batch, layout.size("batch"), at["batch"]),
        count,
        sum(math.prod(map(len, shard)) for shard in shards) if layout.zero else count,
    )
