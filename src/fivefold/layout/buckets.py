"""Buckets: which parameters are reduced together, and in which order. Pure arithmetic, for the ranks and the planner.

    for bucket in buckets(held(spec, layout).values()):
        bucket.names, bucket.partial, bucket.size(), bucket.padded(4)

A decoder's backward pass finishes its units one by one: the top (last norm, head), the blocks from the last to the
first, the bottom (embeddings). Consecutive units join until a bucket is worth a collective of its own. Parameters whose
gradient must also be summed over tp have buckets of their own, since only they take part in that sum.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from fivefold.layout.layout import Layout
from fivefold.layout.sharding import Box, TensorShard, chunk, tensor_shard
from fivefold.spec.model import ModelSpec
from fivefold.spec.parameters import BOTTOM, TOP, Parameter

MINIMUM = 1 << 22  # elements of a bucket: 16 MiB of float32 keep a link busy far longer than its start takes


@dataclass(frozen=True)
class Held:
    """A parameter as one tp rank, or ep rank, holds it: a box of the whole. ZeRO divides the box's first dimension."""

    parameter: Parameter
    tp: TensorShard
    box: Box

    @classmethod
    def of(cls, parameter: Parameter, shard: TensorShard, parts: int, rank: int) -> "Held":
        """On rank `rank` of the `parts` that share it."""
        sides = enumerate(parameter.shape)
        box = tuple(chunk(size, parts, rank) if dim == shard.dim else range(size) for dim, size in sides)
        return cls(parameter, shard, box)

    @property
    def zero_axis(self) -> Literal["zero", "ezero"]:
        """The ranks that ZeRO divides it over."""
        return "ezero" if self.parameter.experts else "zero"

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
        mine = chunk(len(first), parts, index)
        return first[mine.start : mine.stop], *rest

    def share_size(self, parts: int) -> int:
        """Elements of the largest share, to which the others are padded."""
        return math.prod(map(len, self.share(parts, 0)))


def held(spec: ModelSpec, layout: Layout, tp_rank: int = 0, ep_rank: int = 0) -> dict[str, Held]:
    """Every parameter of the model, as the rank at these places of tp and ep holds it."""
    places = {"tp": (layout.tp, tp_rank), "ep": (layout.ep, ep_rank)}
    shards = ((parameter, tensor_shard(parameter, spec, layout)) for parameter in spec.parameters())
    return {parameter.name: Held.of(parameter, shard, *places[shard.axis]) for parameter, shard in shards}


@dataclass(frozen=True)
class Grouping:
    """The parameters of one bucket, and the units of the decoder that they come from."""

    held: tuple[Held, ...]
    units: tuple[int, ...]  # in the order in which backward finishes them
    partial: bool  # gradients are summed over tp too
    late: bool = False  # gradients come from weight-gradient passes of their own
    shared: bool = False  # gradients are summed over the two ends of the pipeline too
    experts: bool = False  # ZeRO divides these over the ranks that have the same experts
    exact: bool = False  # new weights travel in full precision

    @property
    def zero_axis(self) -> Literal["zero", "ezero"]:
        return self.held[0].zero_axis

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.held)

    def size(self) -> int:
        return sum(one.size for one in self.held)

    def padded(self, parts: int) -> int:
        """Elements that a reduce-scatter or all-gather over `parts` ranks is handed: shares padded to the first."""
        return parts * sum(one.share_size(parts) for one in self.held)


def buckets(
    parameters: Iterable[Held],
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

    def kind_of(one: Held) -> tuple[bool, ...]:
        of = one.parameter
        return one.tp.partial, split and of.deferred, shared and of.tied, of.experts > 0, narrow and of.exact

    units: dict[int, list[Held]] = {}
    for one in parameters:
        units.setdefault(one.parameter.unit, []).append(one)
    order = sorted(units, reverse=True)
    groups: list[Grouping] = []
    for kind in product((False, True), repeat=5):
        chosen = {unit: [one for one in units[unit] if kind_of(one) == kind] for unit in order}
        groups += [Grouping(members, numbers, *kind) for members, numbers in _join(chosen, minimum)]
    return sorted(groups, key=lambda group: -group.units[-1])


def _join(units: dict[int, list[Held]], minimum: int) -> Iterator[tuple[tuple[Held, ...], tuple[int, ...]]]:
    """Consecutive units' parameters until they are enough, and those units."""
    numbers: list[int] = []
    members: list[Held] = []
    for unit, mine in units.items():
        if mine:
            numbers.append(unit)
            members += mine
        if sum(one.size for one in members) >= minimum:
            yield tuple(members), tuple(numbers)
            numbers, members = [], []
    if members:
        yield tuple(members), tuple(numbers)


def layers_of(units: Iterable[int]) -> list[int]:
    """The layers among `units`, first to last."""
    return sorted(unit for unit in set(units) if BOTTOM < unit < TOP)
