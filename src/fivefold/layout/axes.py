"""The axis table: all groups of ranks, their names, and the ranks that form each of them.

A layout arranges its ranks in a grid. Each degree (dp, pp, cp, tp) is one dimension of that grid, and `RANK_ORDER`
numbers the ranks: tp varies fastest, so ranks that communicate most are neighbours within a node. An axis is a product
of dimensions: `dp_cp` is dp x cp. Hybrid sharding divides dp once more, into `replicate` x `shard`.

Experts factor the same ranks differently: the ranks of a stage, dp x cp x tp, are `replicate` x `efsdp` x `ep` in a
second grid, and experts are sharded over `ep`. A grid lists factors, slowest first; each factor is an attribute of the
layout, and their product is the world. The readers of the table (the mesh, the traffic counter, the planner) take every
axis that is in it; `EXPERT_AXES` only for a model that has experts.

To add an axis: a field, its place in `RANK_ORDER`, a line in `AXES`, and its name in the compound axes that it joins.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, ClassVar

import msgspec

from fivefold.support.ranges import MAX_RANKS, within

RANK_ORDER = ("dp", "pp", "cp", "tp")  # of the ranks' numbers, slowest first
PLACEMENT_ORDER = RANK_ORDER[::-1]  # the fastest first: which ranks share a node
# The same ranks stage by stage. Grids have pp first because torch 2.11 joins only neighbouring dimensions.
STAGE_ORDER = ("pp", *(axis for axis in RANK_ORDER if axis != "pp"))

# Every axis, in the order in which traffic is shown, and what it is made of, slowest first.
AXES: dict[str, tuple[str, ...]] = {
    "dp": ("dp",),
    "cp": ("cp",),
    "tp": ("tp",),
    "pp": ("pp",),
    "replicate": ("replicate",),  # hybrid sharding: the copies of a shard
    "fsdp": ("shard", "cp"),  # what ZeRO shards over
    "dp_cp": ("dp", "cp"),  # ranks with the same weights and other tokens
    "world": RANK_ORDER,
    "embedding": ("pp",),  # of each pipeline the two ranks with the first and the last stage, which share a tied one
    "batch": ("dp",),  # ranks with other sequences
    "ep": ("ep",),
    "efsdp": ("efsdp",),  # what ZeRO shards experts over
    "expert_dp": ("replicate", "efsdp"),  # ranks with the same experts
    "cp_tp": ("cp", "tp"),  # ranks that share a sequence, and each route a part of it
    "stage": STAGE_ORDER[1:],  # all ranks that have the same layers
}
EXPERT_AXES = ("ep", "efsdp", "expert_dp", "cp_tp", "stage")
_FACTORS = {"dp": ("replicate", "shard")}


def _factor_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for axis in axes for part in _FACTORS.get(axis, (axis,)))


DENSE_GRID = _factor_axes(STAGE_ORDER)
EXPERT_GRID = ("pp", "replicate", "efsdp", "ep")  # of experts


def shown_order(axis: str) -> int:
    """Where traffic of an axis is listed: groups that are no axis come last."""
    return list(AXES).index(axis) if axis in AXES else len(AXES)


Degree = Annotated[int, within(1, MAX_RANKS)]


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """The degrees of a layout, and what follows from them: every axis's size, and where each rank stands."""

    table: ClassVar[Mapping[str, tuple[str, ...]]] = AXES
    grids: ClassVar[tuple[tuple[str, ...], ...]] = (DENSE_GRID, EXPERT_GRID)

    dp: Degree = 1  # replicas, each with its own part of the batch
    tp: Degree = 1  # ranks that share every matrix
    pp: Degree = 1  # ranks that share the layers
    cp: Degree = 1  # ranks that share every sequence

    # ---- numbers that a layout adds --------------------------------------------------------------------------------

    @property
    def replicate(self) -> int:
        return 1

    @property
    def ep(self) -> int:
        return 1

    @property
    def shard(self) -> int:
        return self.dp // self.replicate

    @property
    def efsdp(self) -> int:
        return self.world // (self.pp * self.replicate * self.ep)

    @property
    def last_stage(self) -> int:
        """The pipeline rank that has the last stage."""
        return self.pp - 1

    # ---- sizes -----------------------------------------------------------------------------------------------------

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in Axes.__struct_fields__}

    @property
    def world(self) -> int:
        return math.prod(self.degrees.values())

    def size(self, axis: str) -> int:
        """The number of ranks of an axis. The ends of a pipeline are one rank in V placements."""
        if axis == "embedding":
            return 1 + (self.last_stage > 0)
        return math.prod(getattr(self, factor) for factor in self.table[axis])

    def same_axis(self, axis: str, *, experts: bool = True) -> str:
        """The first axis of the table that has the same ranks. With cp=1 and nothing else fsdp is dp, and so is world.

        Traffic goes by this name, so that a count does not depend on whether torch made one group or two. A model
        without `experts` has no axes of theirs, but for the one that is asked for.
        """
        names = (name for name in self.table if experts or name == axis or name not in EXPERT_AXES)
        return next(name for name in names if self._same(name, axis))

    def _same(self, axis: str, other: str) -> bool:
        if axis == other or (size := self.size(axis)) != self.size(other):
            return axis == other
        if size == 1:
            return True
        if self.grid_of(axis) != self.grid_of(other):
            return set(self.group(axis, 0)) == set(self.group(other, 0))  # the other groups are shifted copies
        return self._wide(axis) == self._wide(other)

    def _wide(self, axis: str) -> list[str]:
        """The factors that make an axis wider than one rank; only a pipeline of two ranks consists of its ends."""
        if axis == "embedding" and self.pp > 2:
            return ["embedding"]
        return [factor for factor in self.factors(axis) if getattr(self, factor) > 1]

    # ---- ranks -----------------------------------------------------------------------------------------------------

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's coordinate along each degree."""
        return {axis: rank // stride % getattr(self, axis) for axis, stride in self._strides(RANK_ORDER).items()}

    def place(self, rank: int) -> str:
        """A rank's coordinates as text, for degrees above one: 'dp 1, pp 0'."""
        return ", ".join(f"{axis} {at}" for axis, at in self.coordinates(rank).items() if getattr(self, axis) > 1)

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; those that are not given are 0."""
        return sum(coordinates.get(axis, 0) * stride for axis, stride in self._strides(RANK_ORDER).items())

    def pipeline(self, rank: int) -> int:
        """The number of the pipeline that a rank belongs to."""
        return self._by_stage(rank) % (self.world // self.pp)

    def position(self, axis: str, rank: int) -> int:
        """A rank's place along an axis, from 0."""
        if axis == "embedding":
            return int(self.last_stage == self.coordinates(rank)["pp"] > 0)
        strides, index, position = self._strides(self.grid_of(axis)), self._by_stage(rank), 0
        for factor in self.factors(axis):
            size = getattr(self, factor)
            position = position * size + index // strides[factor] % size
        return position

    def group(self, axis: str, rank: int) -> list[int]:
        """The ranks along an axis that a rank communicates with, itself among them; empty where it has no part."""
        if axis == "embedding":
            return next((ranks for ranks in self.groups(axis) if rank in ranks), [])
        strides, index, ranks = self._strides(self.grid_of(axis)), self._by_stage(rank), self.by_stage()
        inner = [(getattr(self, factor), strides[factor]) for factor in self.factors(axis)]
        first = index - sum(index // stride % size * stride for size, stride in inner)
        return [ranks[first + step] for step in _offsets(inner)]

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks of every group of an axis, in the axis's order; all ranks list them in the same order."""
        if axis == "embedding":
            return [[line[at] for at in sorted({0, self.last_stage})] for line in self.groups("pp")]
        grid, ranks, own = self.grid_of(axis), self.by_stage(), self.factors(axis)
        strides = self._strides(grid)
        inner, outer = (
            _offsets([(getattr(self, factor), strides[factor]) for factor in factors])
            for factors in (own, [factor for factor in grid if factor not in own])
        )
        return [[ranks[start + step] for step in inner] for start in outer]

    def factors(self, axis: str) -> tuple[str, ...]:
        """The dimensions of a grid whose product an axis is."""
        return _factor_axes(self.table[axis])

    def grid_of(self, *axes: str) -> tuple[str, ...]:
        """The grid that has the axes' factors."""
        factors = {factor for axis in axes for factor in self.factors(axis)}
        return next(grid for grid in self.grids if factors <= set(grid))

    def by_stage(self) -> list[int]:
        """The ranks' numbers stage by stage: the order in which grids factor them."""
        strides = self._strides(RANK_ORDER)
        return list(_rank_offsets(tuple((getattr(self, axis), strides[axis]) for axis in STAGE_ORDER)))

    def _by_stage(self, rank: int) -> int:
        """A rank's place in that order."""
        at = self.coordinates(rank)
        return sum(at[axis] * stride for axis, stride in self._strides(STAGE_ORDER).items())

    def _strides(self, factors: tuple[str, ...]) -> dict[str, int]:
        """How far apart neighbours along each factor are."""
        sizes = [getattr(self, factor) for factor in factors]
        return {factor: math.prod(sizes[place + 1 :]) for place, factor in enumerate(factors)}


@lru_cache(maxsize=32)  # who asks for one group asks for others
def _rank_offsets(dimensions: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(_offsets(list(dimensions)))


def _offsets(dimensions: list[tuple[int, int]]) -> list[int]:
    """Every sum of one step along each (size, stride), the last dimension fastest."""
    offsets = [0]
    for size, stride in dimensions:
        offsets = [start + step * stride for start in offsets for step in range(size)]
    return offsets
