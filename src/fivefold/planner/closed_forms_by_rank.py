"""Closed forms of a model whose layers differ: each pipeline rank has the layers of its stages (closed_forms.py).

    UnlikeClosed({layer: closed_of(layer), ...}).memory()

Each part is the closed form of a model of one kind of layer alone: it has the seconds and bytes of one such block.
Which layers a rank has follows from how the stages are balanced, so a rank's parameters, saved activations and seconds
are sums over its layers by kind, and no mean of the model's is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from fivefold.cost.moe import ParamShare, block_share
from fivefold.cost.step import Workload
from fivefold.layout.stages import balance_layers
from fivefold.planner.closed_forms import Array, BlockArrays, BlockShape, Choices, Closed, PipelineArrays
from fivefold.spec.model import ModelSpec
from fivefold.spec.pattern import Layer


def block_params(spec: ModelSpec, of: Choices, layer: Layer, ep: Array | int = 1) -> ParamShare:
    """Parameters of a block on one rank."""
    shares = {tp: block_share(spec, tp, 1, layer) for tp in np.unique(of.tp).tolist()}
    dense: Any = np.array([shares[tp].dense if tp in shares else 0.0 for tp in range(max(shares) + 1)])[of.tp]
    return ParamShare(dense, next(iter(shares.values())).experts / ep)


class RankLayers(NamedTuple):
    """The layers of one pipeline rank, by kind, in the order of `UnlikeClosed.kinds`."""

    number: int  # the first rank with such layers: it holds the most microbatches
    first: bool  # whether it has the embedding
    last: bool  # and the head
    counts: tuple[int, ...]
    # Of each kind the layers behind the last one of it, by kind, in that of its stages that has the fewest: what these
    # have saved is freed when the kind's own backward pass begins.
    later: tuple[tuple[int, ...], ...]


def ranks_of(spec: ModelSpec, kinds: list[Layer], stages: tuple[tuple[int, ...], ...], seq: int) -> list[RankLayers]:
    """Pipeline ranks, those with the same layers once; `stages` are the numbers of the stages of each."""
    total = sum(map(len, stages))
    ends = [0, *accumulate(balance_layers(spec, total, seq))]
    found: dict[tuple[object, ...], RankLayers] = {}
    for number, own_stages in enumerate(stages):
        layers = [[spec.kinds(layer) for layer in range(ends[stage], ends[stage + 1])] for stage in own_stages]
        counts = tuple(sum(stage.count(kind) for stage in layers) for kind in kinds)
        later = tuple(_later(kind, kinds, layers) for kind in kinds)
        rank = RankLayers(number, 0 in own_stages, total - 1 in own_stages, counts, later)
        found.setdefault(rank[1:], rank)
    return list(found.values())


def _later(kind: Layer, kinds: list[Layer], stages: list[list[Layer]]) -> tuple[int, ...]:
    behind = [stage[len(stage) - stage[::-1].index(kind) :] for stage in stages if kind in stage]
    fewest = min(behind, key=len, default=[])
    return tuple(fewest.count(other) for other in kinds)


class RankArrays(NamedTuple):
    """A rank of every element; those that have fewer ranks repeat their first."""

    number: Array
    first: Array
    last: Array
    counts: Array  # [kinds, elements]
    later: Array  # [kinds, kinds, elements]


@dataclass(frozen=True)
class UnlikeClosed:
    """The parts, and the sums over the ranks' layers."""

    parts: dict[Layer, Closed]

    @property
    def any(self) -> Closed:
        """What all parts have in common: choices, links, pipelines, and what is of no layer."""
        return next(iter(self.parts.values()))

    @cached_property
    def ranks(self) -> list[RankArrays]:
        of, spec, kinds = self.any.of, self.any.workload.spec, list(self.parts)
        pipelines = np.where(self.any.alone, -1, of.pipeline)
        key, at = np.unique(np.stack([of.pp, pipelines]), axis=1, return_inverse=True)
        tables: list[list[RankLayers]] = []
        for pp, index in key.T.tolist():
            stages: tuple[tuple[int, ...], ...] = ((0,),)
            if index >= 0:
                pipeline = self.any.pipelines[index]
                stages = pipeline.schedule.placement(pp, pipeline.chunks).of_rank
            tables.append(ranks_of(spec, kinds, stages, self.any.workload.seq))
        arrays = []
        for number in range(max(map(len, tables))):
            rows = [table[number] if number < len(table) else table[0] for table in tables]
            columns = (np.array([row[field] for row in rows])[at.ravel()] for field in range(5))
            arrays.append(RankArrays(*(np.moveaxis(column, 0, -1) for column in columns)))
        return arrays

    def seconds(self) -> Array:
        """Of a step."""
        each = np.stack([part.each + part.gathering() for part in self.parts.values()])
        ends = np.asarray(self.any.block.ends)
        busiest = np.max([(rank.counts * each).sum(axis=0) + ends * rank.last for rank in self.ranks], axis=0)
        counted = self.any.workload.spec.counted()
        many = np.array([[counted[kind]] for kind in self.parts])
        return self.any.step(busiest, (many * each).sum(axis=0) + ends) + self.after()

    def parameters(self, rank: RankArrays) -> ParamShare:
        spec, shares = self.any.workload.spec, [part.block_params for part in self.parts.values()]
        dense, experts = (
            sum(count * share[at] for count, share in zip(rank.counts, shares, strict=True)) for at in (0, 1)
        )
        tables = np.where(self.any.alone & spec.tied, 1, 1 * rank.first + rank.last)
        return ParamShare(dense + tables * spec.vocab * spec.hidden / self.any.of.tp, experts)

    def after(self) -> Array:
        """The optimizer; gradients and weights that nothing hides: of the rank with the most parameters."""
        of, zero, blocks = self.any.of, self.any.zero, [part.block for part in self.parts.values()]
        most, seconds = np.zeros(len(of.tp)), np.zeros(len(of.tp))
        for rank in self.ranks:
            count = self.parameters(rank)
            forward, backward = (
                np.sum([many * of_kind for many, of_kind in zip(rank.counts, each, strict=True)], axis=0)
                for each in (
                    [block.forward for block in blocks],
                    [block.backward - block.inter_node_backward for block in blocks],
                )
            )
            left = zero.exposed_sync(count, of.zero, of.microbatches, forward, np.maximum(0.0, backward))
            ends = zero.exposed_zero3_outside_blocks(count, of.tp, of.microbatches, forward / self.any.chunks)
            of_rank = zero.optimizer(count, of.zero) + np.where(of.zero == 3, ends, left)
            seconds = np.where(count.total > most, of_rank, seconds)
            most = np.maximum(most, count.total)
        return np.asarray(seconds)

    def memory(self) -> Array:
        """Bytes of the fullest rank."""
        logits, saved = (
            np.asarray(self.any.block.logits),
            [np.asarray(part.block.saved) for part in self.parts.values()],
        )
        worst = [np.asarray(part.block.transient + part.gathered()) for part in self.parts.values()]
        fullest = np.zeros(len(self.any.of.tp))
        for rank in self.ranks:
            flying = self._flying(rank.number)
            held = flying * sum(count * of_kind for count, of_kind in zip(rank.counts, saved, strict=True))
            moment = logits * rank.last
            for count, later, of_kind in zip(rank.counts, rank.later, worst, strict=True):
                freed = sum(behind * each for behind, each in zip(later, saved, strict=True))
                moment = np.maximum(moment, np.where(count > 0, of_kind - freed, 0.0))
            fullest = np.maximum(fullest, self.any.taken(self.parameters(rank), flying, held + moment))
        return fullest

    def _flying(self, number: Array) -> Array:
        """Microbatches that a rank holds, in whole ranks' activations: with whole backward passes, the later the
        fewer."""
        of, flying = self.any.of, np.ones(len(self.any.of.tp))
        for index, (schedule, chunks) in enumerate(self.any.pipelines):
            at = (of.pipeline == index) & ~self.any.alone
            m = of.microbatches[at]
            fewer = 0 if schedule.splits else number[at] * (1 if chunks == 1 else 2 / chunks)
            flying[at] = np.clip(schedule.live(of.pp[at], m, chunks) - fewer, 1 / chunks, m)
        return flying


def closed_by_kind(
    workload: Workload, of: Choices, shapes: list[BlockShape], pipelines: list[PipelineArrays]
) -> list[Closed]:
    """The closed forms of a model without experts, of each kind of layer."""
    spec, parts = workload.spec, []
    for layer in spec.counted():
        block = BlockArrays.of_all(workload, shapes, of.shape, layer)
        # Where layers are alike, what tp does not divide, which is little, counts as if it did.
        dense: Any = spec.block_parameter_count(layer) / of.tp
        params = ParamShare(dense, 0.0) if len(spec.counted()) == 1 else block_params(spec, of, layer)
        parts.append(Closed(workload, of, block, params, pipelines))
    return parts


def combine_kinds(spec: ModelSpec, parts: Sequence[Closed]) -> Closed | UnlikeClosed:
    """Combines the closed forms of a model's kinds of layer, given in the order of `spec.counted()`."""
    return parts[0] if len(parts) == 1 else UnlikeClosed(dict(zip(spec.counted(), parts, strict=True)))
