"""All layouts over mixed nodes at once: arrays of choices and of the groups' orders, with closed forms."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np
from msgspec import structs

from fivefold.cost.activations import deferred_wgrad_bytes
from fivefold.cost.closed_forms import PipelineForm
from fivefold.cost.moe import ParamShare
from fivefold.cost.peak_memory import CUDA_CONTEXT_BYTES, FRAGMENTATION, USABLE_FRACTION
from fivefold.cost.step import Workload
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.closed_forms import MEMORY_SLACK, Array, BlockShape, Choices, Closed
from fivefold.planner.closed_forms_by_rank import ClosedForms
from fivefold.planner.mixed import groups_of, orders
from fivefold.planner.space import SearchQuery, Space, legal, shapes_of
from fivefold.spec.pattern import Layer
from fivefold.support.text import divisors

# ---- closed ---------------------------------------------------------------------------------------------------------
# Closed forms of time and memory for many layouts over mixed nodes at once: they rank and prune.
#
# They apply `closed_forms.py` to each group's devices. Layers are divided by the time they
# take on each rank, as far as its own memory goes: the least time in which all ranks together hold the model.


BISECTION_ROUNDS = 12  # to a few thousandths of that time


@dataclass(frozen=True)
class MixedClosed:
    """What the formulas are made of, by group where devices matter."""

    query: SearchQuery
    shapes: list[BlockShape]
    of: Choices

    @cached_property
    def forms(self) -> list[ClosedForms]:
        """The closed forms on each group's devices, as if all ranks had them."""
        workload, forms = self.query.workload, []
        across = min((group.accelerator.across for group in workload.cluster.groups), key=lambda link: link.bandwidth)
        for group in workload.cluster.groups:
            card = structs.replace(group.accelerator, across=across)
            alone = replace(workload, cluster=Cluster((structs.replace(group, accelerator=card),)))
            forms.append(ClosedForms(alone, self.of, self.shapes, self.query.pipelines))
        return forms

    @cached_property
    def groups(self) -> list[list[Closed]]:
        """The same of each kind of layer, in the order of `counts`."""
        return [forms.by_kind(np.arange(len(self.of.tp))) for forms in self.forms]

    @property
    def first(self) -> Closed:
        """What all groups and kinds have in common."""
        return self.groups[0][0]

    @cached_property
    def counts(self) -> Array:
        """[layers + 1, kinds] how many of the layers below each are of a kind."""
        spec = self.query.workload.spec
        own = np.array([[spec.kinds(layer) == kind for kind in spec.counted()] for layer in range(spec.layers)])
        return np.concatenate([np.zeros((1, own.shape[1]), dtype=int), own.cumsum(axis=0)])

    @cached_property
    def splits(self) -> Array:
        return self.first.fact("splits")

    @cached_property
    def each(self) -> list[list[Array]]:
        """Seconds of a layer and a microbatch, by group and kind."""
        return [[closed.each + closed.gathering() for closed in kinds] for kinds in self.groups]

    @cached_property
    def end(self) -> Array:
        """Seconds of the optimizer, gradients and weights behind the last pass: the slowest group's."""
        return np.max([forms.after() for forms in self.forms], axis=0) + self.query.workload.software.host_step

    @cached_property
    def bytes_of_a_parameter(self) -> Array:
        ones: Any = np.ones(len(self.of.tp))
        state = self.first.zero.states(ParamShare(ones, 0.0), self.of.zero)
        return np.asarray(state["fsdp"].total)

    @cached_property
    def wgrad_excess(self) -> list[Array]:
        """Bytes per layer, by kind, that are held for W beyond what was saved, where backward is split."""
        return [
            self._wgrad_excess(kind, part.block.saved) for kind, part in zip(self._kinds, self.groups[0], strict=True)
        ]

    @property
    def _kinds(self) -> list[Layer]:
        return list(self.query.workload.spec.counted())

    def _wgrad_excess(self, kind: Layer, saved: Any) -> Array:
        workload, deferred = self.query.workload, []
        for shape in self.shapes:
            layout = Layout(tp=shape.tp, cp=shape.cp, cp_kind=shape.cp_kind, sp=shape.sp, recompute=shape.recompute)
            tokens = shape.samples * workload.seq // shape.cp
            activation_bytes = workload.block_cost.activation_bytes
            deferred.append(deferred_wgrad_bytes(workload.spec, layout, tokens, activation_bytes, kind))
        return np.where(self.splits, np.maximum(0.0, np.array(deferred)[self.of.shape] - saved), 0.0)

    def of_rows(self, rows: Array, ranks: list[int]) -> tuple[Array, Array]:
        """Seconds of a step, and the fullest rank's share of its device, with these groups as pipeline ranks."""
        p = len(ranks)
        ends = np.zeros((len(rows), p))
        bent = np.array([pipeline.both_ends for pipeline in self.query.pipelines])[self.of.pipeline[rows]]
        last = np.where(bent, 0, p - 1)
        at = np.arange(len(rows))
        by_group = np.stack([np.asarray(kinds[0].block.ends)[rows] for kinds in self.groups], axis=1)
        ends[at, last] = by_group[at, np.array(ranks)[last]]
        fixed, per_layer, room = self._memory(rows, ranks, last)
        # [kinds, rows, ranks]
        each = np.stack([[of_kind[rows] for of_kind in self.each[group]] for group in ranks], axis=-1)
        deal = _deal_alike if len(each) == 1 else partial(_deal_unlike, self.counts)
        seconds, held, slowest = deal(each, ends, per_layer, room - fixed, self.query.workload.spec.layers)
        share = ((fixed + held) * (1 + FRAGMENTATION) + CUDA_CONTEXT_BYTES) / self._devices(ranks)
        return self._pipeline(rows, seconds, slowest) + self.end[rows], share.max(axis=1)

    def _devices(self, ranks: list[int]) -> Array:
        return np.array([self.query.workload.cluster.groups[group].accelerator.memory for group in ranks], dtype=float)

    def _memory(self, rows: Array, ranks: list[int], last: Array) -> tuple[Array, Array, Array]:
        """By rank: bytes without any layer, bytes of each layer by kind, and what the device has room for."""
        spec, software, p = self.query.workload.spec, self.query.workload.software, len(ranks)
        first, rank = self.first, np.arange(p)
        logits, message = (np.asarray(column)[rows, None] for column in (first.block.logits, first.block.p2p_bytes))
        chunks, tp = first.chunks[rows, None], self.of.tp[rows, None]
        state = self.bytes_of_a_parameter[rows, None]
        flying = self._flying(rows, p)
        per_layer, transient = [], np.zeros((len(rows), 1))
        for kind, closed, excess in zip(self._kinds, self.groups[0], self.wgrad_excess, strict=True):
            saved = np.asarray(closed.block.saved)[rows, None]
            kept = state * spec.block_parameter_count(kind) / tp + saved * flying
            per_layer.append(kept + excess[rows, None] / chunks)
            transient = np.maximum(transient, (closed.block.transient + closed.gathered())[rows, None])
        table = state * spec.vocab * spec.hidden / tp
        is_last = rank[None, :] == last[:, None]
        fixed = table * ((rank == 0)[None, :] + 0.0 + is_last) + software.bucket_bytes
        moments = np.maximum(transient, logits * is_last)
        messages = (1 + 2 * chunks + flying * chunks) * message
        room = (USABLE_FRACTION * self._devices(ranks) - CUDA_CONTEXT_BYTES) / (1 + FRAGMENTATION)
        return fixed + moments + messages, np.stack(per_layer), room[None, :]

    def _flying(self, rows: Array, p: int) -> Array:
        """Microbatches that each rank holds, in whole ranks' activations: with whole backward passes, the later the
        fewer."""
        flying, rank = np.ones((len(rows), p)), np.arange(p)
        for index, (record, chunks) in enumerate(self.query.pipelines):
            at = self.of.pipeline[rows] == index
            m = self.of.microbatches[rows][at][:, None]
            fewer = 0 if record.splits else rank[None, :] * (1 if chunks == 1 else 2 / chunks)
            flying[at] = np.clip(record.live(p, m, chunks) - fewer, 1 / chunks, m)
        return flying

    def _pipeline(self, rows: Array, loads: Array, slowest: Array) -> Array:
        form = PipelineForm(*(column[rows] for column in self.first.form))
        overlap_fraction = self.query.workload.software.hides("pp")
        return np.asarray(form.seconds(slowest, loads.sum(axis=1), self.first.sending()[rows], overlap_fraction))


Dealt = tuple[Array, Array, Array]  # of each rank its seconds and its layers' bytes; and the slowest's seconds


def _deal_alike(each: Array, ends: Array, per_layer: Array, room: Array, layers: int) -> Dealt:
    """Layers of each rank in the least time in which all ranks hold them all. Of one kind, so that a rank has room for
    a number of them."""
    [each], [per_layer] = each, per_layer
    caps = np.clip(np.floor(room / per_layer), 0, layers)
    possible = caps.sum(axis=1) >= layers
    caps = np.where(possible[:, None], caps, layers)

    def held(time: Array) -> Array:
        return np.clip(np.floor((time[:, None] - ends) / each), 0, caps)

    # From what would do if layers could be cut to where the busiest rank has all that it has room for.
    low = (layers + (ends / each).sum(axis=1)) / (1 / each).sum(axis=1)
    high = (caps * each + ends).max(axis=1)
    dealt = held(_least(low, high, lambda time: held(time).sum(axis=1) >= layers))
    seconds = dealt * each + ends
    return seconds, dealt * per_layer, np.maximum(seconds.max(axis=1), 0.0)


def _deal_unlike(counts: Array, each: Array, ends: Array, per_layer: Array, room: Array, layers: int) -> Dealt:
    """The same for several kinds: a rank takes the layers that follow the previous rank's."""
    ranks = range(ends.shape[1])
    seconds = [counts @ each[:, :, rank] for rank in ranks]  # [layers + 1, rows] of all layers below
    bytes_ = [counts @ per_layer[:, :, rank] for rank in ranks]
    at = np.arange(len(ends))

    def stops(time: Array, limit: Array) -> Iterator[Array]:
        """Where each rank's layers end, at the latest."""
        stop = np.zeros(len(ends), dtype=int)
        for rank in ranks:
            fits = seconds[rank] <= seconds[rank][stop, at] + time - ends[:, rank]
            fits &= bytes_[rank] <= bytes_[rank][stop, at] + limit[:, rank]
            stop = np.maximum(stop, fits.sum(axis=0) - 1)
            yield stop

    most = np.max([own[-1] for own in seconds], axis=0) + ends.max(axis=1)
    *_, end = stops(most, room)
    limit = np.where((end == layers)[:, None], room, np.inf)

    def enough(time: Array) -> Array:
        *_, end = stops(time, limit)
        return end == layers

    after = np.stack([np.zeros(len(ends), dtype=int), *stops(_least(ends.max(axis=1), most, enough), limit)])
    own, held = (
        np.stack([table[after[rank + 1], at] - table[after[rank], at] for rank, table in enumerate(tables)], axis=1)
        for tables in (seconds, bytes_)
    )
    return own + ends, held, (own + ends).max(axis=1)


def _least(low: Array, high: Array, enough: Callable[[Array], Array]) -> Array:
    """The least times that are enough, nearly."""
    for _ in range(BISECTION_ROUNDS):
        middle = (low + high) / 2
        fine = enough(middle)
        low, high = np.where(fine, low, middle), np.where(fine, middle, high)
    return high


# ---- space ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixedSpace:
    """All combinations of choices and orders of the groups; `memory` is the fullest rank's share of its device."""

    space: Space
    orders: list[Cluster]
    order: Array  # which of them an element has

    def __len__(self) -> int:
        return len(self.space)

    @property
    def fits(self) -> Array:
        return self.space.memory <= USABLE_FRACTION * MEMORY_SLACK

    def workload(self, workload: Workload, at: int) -> Workload:
        """One combination, its layers not yet divided."""
        cluster, layout = self.orders[self.order[at]], self.space.layout(at)
        return replace(workload, cluster=cluster, layout=layout, groups=groups_of(cluster, layout))


def mixed_space(query: SearchQuery) -> MixedSpace:
    """Every combination in which each replica spans all groups."""
    shapes = list(shapes_of(query))
    clusters = list(orders(query.workload.cluster))
    of = legal(query, shapes, _combinations(query, shapes))
    count = len(of.tp)
    seconds, memory = (np.full((len(clusters), count), np.inf) for _ in range(2))
    closed = MixedClosed(query, shapes, of)
    for number, cluster in enumerate(clusters):
        for pp in np.unique(of.pp).tolist():
            rows = np.flatnonzero(of.pp == pp)
            seconds[number, rows], memory[number, rows] = closed.of_rows(
                rows, _ranks(query.workload.cluster, cluster, pp)
            )
    tiled = Choices(*(np.tile(column, len(clusters)) for column in of))
    space = Space(tiled, shapes, query.pipelines, memory.ravel(), seconds.ravel().take)
    return MixedSpace(space, clusters, np.repeat(np.arange(len(clusters)), count))


def _ranks(given: Cluster, order: Cluster, pp: int) -> list[int]:
    """The group of each pipeline rank, by its number in the given cluster."""
    return [given.groups.index(group) for group in order.groups for _ in range(group.world * pp // order.world)]


def _combinations(query: SearchQuery, shapes: list[BlockShape]) -> Choices:
    """Shapes with every dp that leaves each replica whole nodes of every kind, ZeRO stage and pipeline."""
    rows = np.array(list(_rows(query, shapes)), dtype=np.int64).reshape(-1, 7)
    tp, pp, cp, dp, shape, zero, pipeline = rows.T
    samples = np.array([choice.samples for choice in shapes] or [1], dtype=np.int64)[shape]
    return Choices(tp, pp, cp, dp, zero, samples, query.workload.batch // (dp * samples), shape, pipeline)


def _rows(query: SearchQuery, shapes: list[BlockShape]) -> Iterator[tuple[int, ...]]:
    cluster, batch, most = query.workload.cluster, query.workload.batch, query.workload.spec.layers + 2
    pipelines = range(len(query.pipelines))
    for number, shape in enumerate(shapes):
        for dp in query.free("dp", divisors(cluster.world)):
            row = dp * shape.tp * shape.cp
            pp = cluster.world // row
            if pp > most or pp != query.fixed.get("pp", pp) or batch % (dp * shape.samples) or not _spans(cluster, row):
                continue
            if any(group.world // dp % group.gpus for group in cluster.groups):
                continue
            zeros = query.free("zero", [0, 1, 2, 3] if dp * shape.cp > 1 else [0])
            for zero, pipeline in product(zeros, pipelines):
                yield shape.tp, pp, shape.cp, dp, number, zero, pipeline


def _spans(cluster: Cluster, row: int) -> bool:
    return not any(group.world % row for group in cluster.groups)
