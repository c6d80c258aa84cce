"""Whole matrices for an optimizer whose rule reads them: which rank updates which, and what ranks send for it.

    owners = matrix_owners(spec, layout, seq, config, pp=0)
    owners.batches                          # by place in the stage: matrices of one shape together
    for round_ in owners.rounds(place=3):   # what that rank computes, sends and gets, round by round
        round_.batch, round_.to_owners, round_.to_holders

tp and ZeRO leave a rank with a part of a matrix. So every matrix of a stage has one owner among the ranks that hold a
part of it: they send it their parts, it computes the update, and it sends each of them its part of that. Nothing is
computed twice, and matrices are dealt out by what they cost, the most expensive first, each to the rank that has least.

The limit. With P parameters in matrices on a stage of N ranks, each part held by C of them, a rank sends and gets
about P/N elements on the way to the owners, once, and C P/N on the way back: with one copy that is 2P/N, where
gathering every matrix on every rank would be P, and computing all updates everywhere N times the FLOPs. No rank can
compute less than total/N; what is above it is at most the last matrix that was dealt, which cannot be cut.

An owner takes its matrices in batches of one shape and of at most `MAX_BATCH_ELEMENTS` elements (or one matrix), so
that many small ones are one product. A round is one batch of every owner: one all-to-all to the owners, one back for
each of the copies of a part, so that no buffer is larger than the matrices in it. An owner's own parts are not sent.

Where every rank of the stage holds all matrices of a round whole (ZeRO 0 without tp), nothing is sent before the rule
runs, and the updates are all-gathered: those of several rounds together, in calls of a bounded size.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heapreplace
from typing import NamedTuple

from fivefold.layout.layout import Layout
from fivefold.layout.sharding import LocalParam, TensorShard, tensor_shard
from fivefold.layout.stages import stages_of
from fivefold.optim.base import OptimizerConfig, matrix_flops, reads_whole
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter

MAX_BATCH_ELEMENTS = 1 << 26  # elements that an owner computes with at a time: in bfloat16 an eighth of a GB
MAX_WAITING_ELEMENTS = 2 * MAX_BATCH_ELEMENTS  # elements of an owner's updates that wait to be all-gathered together
MAX_GATHERED_ELEMENTS = 4 * MAX_BATCH_ELEMENTS  # elements that an all-gather brings to a rank at most


class Matrix(NamedTuple):
    """One matrix of a parameter: all of its rows, or one expert's."""

    parameter: Parameter
    rows: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.parameter.shape[-1]


def matrices_of(parameter: Parameter) -> Iterator[Matrix]:
    """The matrices of a parameter of two dimensions: experts lie one below the other, and each has its own."""
    rows = parameter.shape[0] // max(1, parameter.experts)
    for first in range(0, parameter.shape[0], rows):
        yield Matrix(parameter, range(first, first + rows))


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """The overlap of a matrix and a rank's box of its parameter."""

    matrix: Matrix
    number: int  # of the matrix in its owner's batch
    rows: range  # of the parameter
    columns: range

    @property
    def name(self) -> str:
        return self.matrix.parameter.name

    @property
    def size(self) -> int:
        return len(self.rows) * len(self.columns)


Batch = list[Matrix]
Parts = dict[int, list[Part]]  # by place of the other rank in the stage, of those that have any


def elements(parts: Parts) -> int:
    return sum(part.size for of_rank in parts.values() for part in of_rank)


def in_order(parts: Parts) -> list[Part]:
    """As they lie in a buffer: rank by rank."""
    return [part for rank in sorted(parts) for part in parts[rank]]


class AllToAll(NamedTuple):
    """One all-to-all, as one rank sees it."""

    sent: Parts  # by the rank that gets them
    received: Parts  # by the rank that sends them


@dataclass(frozen=True)
class Gather:
    """The all-gathers of the updates of consecutive rounds, the same on every rank."""

    parts: list[list[Part]]  # by owner: whole matrices, one after the other
    length: int  # elements of the owner that has most; the others' are padded to it

    @property
    def calls(self) -> list[range]:
        """Of each call the elements that every owner gives."""
        step = max(1, MAX_GATHERED_ELEMENTS // len(self.parts))
        return [range(first, min(first + step, self.length)) for first in range(0, self.length, step)]


@dataclass(frozen=True)
class Round:
    """A round, as one rank sees it."""

    batch: Batch  # that it owns; empty where others have more batches
    held: list[Part]  # all that it holds of the round's matrices
    own: list[Part]  # what it holds of its batch
    to_owners: AllToAll | None  # None where no rank lacks a part
    to_holders: list[AllToAll]  # one for each copy of a part; none where updates are gathered
    gather: Gather | None = None  # that its updates are part of
    first: int = 0  # where they begin among this owner's
    last: bool = False  # whether it is the last round of the gather

    @property
    def read(self) -> list[Part]:
        """Of what it holds, the parts that its own rule or another rank's reads: of several copies, one."""
        return [*self.own, *([] if self.to_owners is None else in_order(self.to_owners.sent))]

    @property
    def unread(self) -> list[list[Part]]:
        """The others, whose states advance alone: in lists of `MAX_BATCH_ELEMENTS` elements at most, or of one part."""
        read = {*map(id, self.read)}
        lists: list[list[Part]] = []
        size = MAX_BATCH_ELEMENTS
        for part in self.held:
            if id(part) in read:
                continue
            if size + part.size > MAX_BATCH_ELEMENTS:
                lists.append([])
                size = 0
            lists[-1].append(part)
            size += part.size
        return lists

    @property
    def calls(self) -> list[AllToAll]:
        return [*([] if self.to_owners is None else [self.to_owners]), *self.to_holders]


# ---- who holds what -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sharing:
    """How the ranks of a stage share a parameter."""

    layout: Layout
    parameter: Parameter
    shard: TensorShard
    cache: dict[int, tuple[range, range, int]]  # by rank

    @classmethod
    def of(cls, parameter: Parameter, spec: ModelSpec, layout: Layout) -> "_Sharing":
        return cls(layout, parameter, tensor_shard(parameter, spec, layout), {})

    @cached_property
    def axis(self) -> str:
        """The axis that ZeRO shards it over."""
        return LocalParam.of(self.parameter, self.shard, 1, 0).fsdp_axis

    @cached_property
    def sharded(self) -> bool:
        return self.layout.zero > 0 and self.layout.size(self.axis) > 1

    @cached_property
    def whole(self) -> bool:
        """Whether each of its matrices is whole on every rank that holds any of it."""
        cut = self.shard.dim is not None and self.shard.axis == "tp" and self.layout.tp > 1
        return not self.sharded and not cut

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same."""
        axes = ("replicate",) if self.sharded else ("replicate", self.axis)
        return axes if self.shard.dim is not None else (*axes, self.shard.axis)

    @cached_property
    def copies(self) -> int:
        """How many ranks hold the same part."""
        return math.prod(map(self.layout.size, self.copied))

    def held(self, rank: int) -> tuple[range, range, int]:
        """The rows and columns that a rank holds, and which copy of them it is."""
        if rank not in self.cache:
            layout, inner = self.layout, self.shard.axis
            param = LocalParam.of(self.parameter, self.shard, layout.size(inner), layout.position(inner, rank))
            box = param.box
            if self.sharded:
                box = param.share(layout.size(self.axis), layout.position(self.axis, rank))
            copy = 0
            for axis in self.copied:
                copy = copy * layout.size(axis) + layout.position(axis, rank)
            self.cache[rank] = box[0], box[1], copy
        return self.cache[rank]


# ---- who updates what -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatrixOwners:
    """The matrices of one pipeline rank's stages, dealt out to the ranks that have these layers."""

    layout: Layout
    ranks: list[int]  # of the stage, by place
    sharing: dict[str, _Sharing]  # by parameter
    by_ep: dict[int, list[int]]  # places, by their place along ep: these have the same experts
    batches: list[list[Batch]]  # that a rank owns, by place
    costs: list[float]  # by place: FLOPs
    prices: dict[tuple[int, int], float]  # of a matrix of a shape: FLOPs

    @classmethod
    def of(
        cls, parameters: Iterable[Parameter], spec: ModelSpec, layout: Layout, config: OptimizerConfig, pp: int
    ) -> "MatrixOwners":
        """Of these parameters, which the ranks at `pp` along the pipeline have."""
        read = [parameter for parameter in parameters if reads_whole(config, parameter)]
        ranks = layout.group("stage", layout.rank(pp=pp))
        by_ep: dict[int, list[int]] = defaultdict(list)
        for place, rank in enumerate(ranks):
            by_ep[layout.position("ep", rank)].append(place)
        matrices = [matrix for parameter in read for matrix in matrices_of(parameter)]
        prices = {shape: matrix_flops(config, *shape) for shape in dict.fromkeys(each.shape for each in matrices)}
        priced = [(prices[matrix.shape], matrix) for matrix in matrices]
        priced.sort(key=lambda entry: -entry[0])  # stable: the same on every rank
        costs, owned = [0.0] * len(ranks), [Batch() for _ in ranks]
        # Experts first: fewer ranks hold one.
        for experts in (True, False):
            heaps: dict[int, list[tuple[float, int]]] = {}  # of ranks that hold the same, the one with least first
            for cost, matrix in priced:
                if (matrix.parameter.experts > 0) is not experts:
                    continue
                group = _ep_place(matrix, layout) if experts else -1
                if group not in heaps:
                    places = by_ep[group] if experts else range(len(ranks))
                    heaps[group] = [(costs[place], place) for place in places]
                    heapify(heaps[group])
                least, place = heaps[group][0]
                costs[place] = least + cost
                heapreplace(heaps[group], (costs[place], place))
                owned[place].append(matrix)
        sharing = {parameter.name: _Sharing.of(parameter, spec, layout) for parameter in read}
        return cls(layout, ranks, sharing, by_ep, [_batches(own) for own in owned], costs, prices)

    @property
    def num_rounds(self) -> int:
        return max(map(len, self.batches))

    @cached_property
    def longest(self) -> float:
        """FLOPs that an update waits for: of each round those of the owner that has most, since all meet after it.
        Rounds that are gathered together are one."""
        spans: list[list[float]] = []
        for number in range(self.num_rounds):
            costs = [sum(self.prices[matrix.shape] for matrix in batch) for batch in self._at(number)]
            gather = self._gathers.get(number)
            if gather is not None and gather is self._gathers.get(number - 1):
                costs = [sum(both) for both in zip(spans.pop(), costs, strict=True)]
            spans.append(costs)
        return sum(map(max, spans))

    def rounds(self, place: int) -> Iterator[Round]:
        """What the rank at that place of the stage does, round by round."""
        first = 0
        for number in range(self.num_rounds):
            batches = self._at(number)
            if (gather := self._gathers.get(number)) is None:
                yield self._round(batches, place)
                continue
            parts = [_whole(batch) for batch in batches]
            last = self._gathers.get(number + 1) is not gather
            held = [part for of_owner in parts for part in of_owner]
            yield Round(batches[place], held, parts[place], None, [], gather, first, last)
            first = 0 if last else first + sum(part.size for part in parts[place])

    def _at(self, number: int) -> list[Batch]:
        """The batches of a round, by owner."""
        return [owned[number] if number < len(owned) else [] for owned in self.batches]

    @cached_property
    def _gathers(self) -> dict[int, Gather]:
        """By the numbers of rounds whose matrices every rank of the stage holds whole."""
        runs: list[list[int]] = []  # of rounds that are gathered together
        kept: list[int] = []  # elements of each owner in the last of them
        for number in range(self.num_rounds if len(self.ranks) > 1 else 0):
            batches = self._at(number)
            if not all(self._everywhere(matrix.parameter) for batch in batches for matrix in batch):
                kept = []
                continue
            sizes = [sum(math.prod(matrix.shape) for matrix in batch) for batch in batches]
            if not kept or max(map(sum, zip(kept, sizes, strict=True))) > MAX_WAITING_ELEMENTS:
                runs.append([])
                kept = [0] * len(sizes)
            runs[-1].append(number)
            kept = [*map(sum, zip(kept, sizes, strict=True))]
        return {number: gather for run in runs for gather in [self._gather(run)] for number in run}

    def _gather(self, run: list[int]) -> Gather:
        rounds = [self._at(number) for number in run]
        parts = [[part for batch in of_owner for part in _whole(batch)] for of_owner in zip(*rounds, strict=True)]
        return Gather(parts, max(sum(part.size for part in of_owner) for of_owner in parts))

    def _everywhere(self, parameter: Parameter) -> bool:
        sharing = self.sharing[parameter.name]
        return sharing.whole and sharing.copies == len(self.ranks)

    def _round(self, batches: list[Batch], place: int) -> Round:
        shared = {matrix.parameter.name: self.sharing[matrix.parameter.name] for batch in batches for matrix in batch}
        to_owners = _nothing()
        to_holders = [_nothing() for _ in range(max(each.copies for each in shared.values()))]
        held: list[Part] = []
        own: list[Part] = []
        for owner, batch in enumerate(batches):
            for number, matrix in enumerate(batch):
                if (mine := self._part(matrix, number, place)) is None:
                    continue
                held.append(mine)
                if owner == place:
                    own.append(mine)
                    continue
                turn = self._turn(matrix, owner, place)
                to_holders[turn].received[owner].append(mine)
                if turn == 0:
                    to_owners.sent[owner].append(mine)
        for number, matrix in enumerate(batches[place]):
            for other in self._holders(matrix):
                if other == place or (theirs := self._part(matrix, number, other)) is None:
                    continue
                turn = self._turn(matrix, place, other)
                to_holders[turn].sent[other].append(theirs)
                if turn == 0:
                    to_owners.received[other].append(theirs)
        if all(each.whole for each in shared.values()):  # each copy is one rank, and the owner's is itself
            return Round(batches[place], held, own, None, to_holders[1:])
        return Round(batches[place], held, own, to_owners, to_holders)

    def _part(self, matrix: Matrix, number: int, place: int) -> Part | None:
        """What a rank holds of a matrix."""
        rows, columns, _ = self.sharing[matrix.parameter.name].held(self.ranks[place])
        rows = range(max(rows.start, matrix.rows.start), min(rows.stop, matrix.rows.stop))
        return Part(matrix, number, rows, columns) if rows and columns else None

    def _holders(self, matrix: Matrix) -> Iterable[int]:
        """The places of the ranks among which its parts are."""
        return self.by_ep[_ep_place(matrix, self.layout)] if matrix.parameter.experts else range(len(self.ranks))

    def _turn(self, matrix: Matrix, owner: int, other: int) -> int:
        """When an owner serves another rank: first those that hold the same copy as it does, then the next copy."""
        sharing = self.sharing[matrix.parameter.name]
        own, theirs = (sharing.held(self.ranks[place])[2] for place in (owner, other))
        return (theirs - own) % sharing.copies


def _nothing() -> AllToAll:
    return AllToAll(defaultdict(list), defaultdict(list))


def _whole(batch: Batch) -> list[Part]:
    """The matrices of a batch as the only parts of themselves."""
    return [Part(matrix, at, matrix.rows, range(matrix.shape[1])) for at, matrix in enumerate(batch)]


def _ep_place(matrix: Matrix, layout: Layout) -> int:
    """The place along ep that has an expert."""
    return matrix.rows.start * layout.ep // matrix.parameter.shape[0]


def _batches(matrices: list[Matrix]) -> list[Batch]:
    """Matrices of one shape together, as many as fit into a batch; the largest shapes first."""
    by_shape: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        by_shape[matrix.shape].append(matrix)
    batches: list[Batch] = []
    for shape in sorted(by_shape, reverse=True):
        alike, several = by_shape[shape], max(1, MAX_BATCH_ELEMENTS // math.prod(shape))
        batches += [alike[first : first + several] for first in range(0, len(alike), several)]
    return batches


@lru_cache(maxsize=32)
def matrix_owners(spec: ModelSpec, layout: Layout, seq: int, config: OptimizerConfig, pp: int) -> MatrixOwners:
    """Of a pipeline rank whose layers were divided for sequences of `seq` tokens."""
    stages = stages_of(spec, layout, seq)
    here = [stages[number] for number in layout.placement.of_rank[pp]]
    held = [parameter for parameter in spec.parameters() if any(stage.holds(parameter) for stage in here)]
    return MatrixOwners.of(held, spec, layout, config, pp)
