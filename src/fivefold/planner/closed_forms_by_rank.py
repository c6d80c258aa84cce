"""Closed forms of a model whose layers differ: each pipeline rank has the layers of its stages (closed_forms.py).

    ClosedForms(workload, choices, shapes, pipelines).memory()

Each part is the closed form of a model of one kind of layer alone: it has the seconds and bytes of one such block.
Which layers a rank has follows from how the stages are balanced, so a rank's parameters, saved activations and seconds
are sums over its layers by kind, and no mean of the model's is taken.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from fivefold.cost.moe import ParamShare, block_share
from fivefold.cost.step import Workload
from fivefold.layout.stages import balance_layers
from fivefold.planner.closed_forms import (
    Array,
    BlockArrays,
    BlockShape,
    Choices,
    Closed,
    Columns,
    LinkArrays,
    PipelineArrays,
    by_pipeline,
    shape_tables,
    used,
)
from fivefold.spec.model import ModelSpec
from fivefold.spec.pattern import Layer


def block_params(spec: ModelSpec, of: Choices, layer: Layer, ep: Array | int = 1) -> ParamShare:
    """Parameters of a block on one rank."""
    shares = {tp: block_share(spec, tp, 1, layer) for tp in used(of.tp)}
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


@dataclass(frozen=True)
class UnlikeClosed:
    """The parts, and the sums over the ranks' layers. All elements have the same pp, and beyond one rank the same
    pipeline: `by_pipeline` parts them so."""

    parts: dict[Layer, Closed]

    @property
    def any(self) -> Closed:
        """What all parts have in common: choices, links, pipelines, and what is of no layer."""
        return next(iter(self.parts.values()))

    @cached_property
    def ranks(self) -> list[RankLayers]:
        of, workload = self.any.of, self.any.workload
        pp, stages = int(of.pp[0]), ((0,),)
        if pp > 1:
            pipeline = self.any.pipelines[of.pipeline[0]]
            stages = pipeline.schedule.placement(pp, pipeline.chunks).of_rank
        return ranks_of(workload.spec, list(self.parts), stages, workload.seq)

    def seconds(self) -> Array:
        """Of a step."""
        each = np.stack([part.each + part.gathering() for part in self.parts.values()])
        ends = np.asarray(self.any.block.ends)
        busiest = np.max([_sum(rank.counts, each) + ends * rank.last for rank in self.ranks], axis=0)
        counted = self.any.workload.spec.counted()
        many = np.array([[counted[kind]] for kind in self.parts])
        return self.any.step(busiest, (many * each).sum(axis=0) + ends) + self.after()

    def parameters(self, rank: RankLayers) -> ParamShare:
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

    def _flying(self, number: int) -> Array:
        """Microbatches that a rank holds, in whole ranks' activations: with whole backward passes, the later the
        fewer."""
        of = self.any.of
        if of.pp[0] == 1:
            return np.ones(len(of.tp))
        schedule, chunks = self.any.pipelines[of.pipeline[0]]
        fewer = 0 if schedule.splits else number * (1 if chunks == 1 else 2 / chunks)
        return np.asarray(np.clip(schedule.live(of.pp, of.microbatches, chunks) - fewer, 1 / chunks, of.microbatches))


def _sum(counts: tuple[int, ...], each: Array) -> Array:
    """Of so many layers of each kind."""
    return np.asarray(sum(count * of_kind for count, of_kind in zip(counts, each, strict=True)))


@dataclass(frozen=True)
class ClosedForms:
    """The closed forms of a model without experts. What a block costs in each shape is worked out once, for all
    elements; the formulas are for as many of them as are asked for."""

    workload: Workload
    of: Choices
    shapes: list[BlockShape]
    pipelines: list[PipelineArrays]

    @cached_property
    def links(self) -> LinkArrays:
        return LinkArrays.of(self.workload, self.of)

    @cached_property
    def tables(self) -> dict[Layer, Array]:
        """Of each kind of layer, what a block costs, by shape."""
        kinds = dict.fromkeys(self.workload.spec.counted(), BlockArrays.in_shape)
        return shape_tables(self.workload, self.shapes, self.of.shape, kinds)

    def by_kind(self, rows: Array) -> list[Closed]:
        """Of some elements, as if all layers were of one kind: one for each kind, in the order of `spec.counted()`."""
        of, links = self.of.rows(rows), self.links.rows(rows)
        return [self._of_kind(of, links, rows, layer) for layer in self.workload.spec.counted()]

    def _of_kind(self, of: Choices, links: LinkArrays, rows: Array, layer: Layer) -> Closed:
        spec, block = self.workload.spec, Columns(BlockArrays, self.tables[layer], of.shape)
        # Where layers are alike, what tp does not divide, which is little, counts as if it did.
        dense: Any = spec.block_parameter_count(layer) / of.tp
        params = ParamShare(dense, 0.0) if len(spec.counted()) == 1 else block_params(spec, of, layer)
        return Closed(self.workload, of, block, params, self.pipelines, links)

    def part(self, rows: Array) -> Closed | UnlikeClosed:
        """Of elements that `by_pipeline` has put together, or some of these."""
        parts = self.by_kind(rows)
        return (
            parts[0] if len(parts) == 1 else UnlikeClosed(dict(zip(self.workload.spec.counted(), parts, strict=True)))
        )

    def memory(self) -> Array:
        """Bytes of each element's fullest rank."""
        memory = np.empty(len(self.of.tp))
        for rows in by_pipeline(self.of):
            memory[rows] = self.part(rows).memory()
        return memory

    def seconds(self, of_rows: Array) -> Array:
        """Seconds of a step of these elements."""
        seconds = np.empty(len(of_rows))
        for rows in by_pipeline(self.of.rows(of_rows)):
            seconds[rows] = self.part(of_rows[rows]).seconds()
        return seconds

    def after(self) -> Array:
        """Seconds behind each element's last pass."""
        after = np.empty(len(self.of.tp))
        for rows in by_pipeline(self.of):
            after[rows] = self.part(rows).after()
        return after
