"""Closed forms of time and memory for many layouts at once: they rank and prune, and schedules decide (search.py).

Each element of the arrays is a combination of choices. The cost of a block depends on only a few of them (a
`BlockShape`), and is computed once for each by the functions that time a single layout.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from fivefold.cost.activations import SavedByBlock
from fivefold.cost.block import BlockCost, PassTimes
from fivefold.cost.closed_forms import PipelineForm, ZeroCost
from fivefold.cost.collective_time import Kind, Reach, Topology
from fivefold.cost.kernels import Device
from fivefold.cost.moe import ParamShare
from fivefold.cost.peak_memory import (
    CUDA_CONTEXT_BYTES,
    FRAGMENTATION,
    cp_buffer_bytes,
    loss_peak,
    mlp_backward_bytes,
)
from fivefold.cost.software import SoftwareProfile
from fivefold.cost.step import Workload, p2p_bytes
from fivefold.layout.layout import ContextKind, Dispatch, Layout, Recompute
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.registry import RECORDS
from fivefold.spec.pattern import Layer

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")  # the more is made again, the later
MEMORY_SLACK = 1.05  # closed forms of memory may be off by this factor
SPLIT_BACKWARD_SCHEDULE = next(
    record.name for record in RECORDS if record.splits
)  # any of them: a block costs the same in all
Array = np.ndarray[Any, np.dtype[Any]]


class BlockShape(NamedTuple):
    """The choices that decide what a block costs."""

    tp: int
    cp: int
    cp_kind: ContextKind
    sp: bool
    samples: int  # of a microbatch
    recompute: Recompute

    def of(self, workload: Workload) -> Workload:
        """A workload of one microbatch in this shape."""
        layout = Layout(tp=self.tp, cp=self.cp, cp_kind=self.cp_kind, sp=self.sp, recompute=self.recompute)
        return replace(workload, layout=layout, batch=self.samples)


@dataclass(frozen=True)
class ShapeCost:
    """A block in one shape."""

    cost: BlockCost
    activations: SavedByBlock
    logits: float  # bytes
    p2p_bytes: float

    @classmethod
    def of(cls, workload: Workload, shape: BlockShape, layer: Layer) -> "ShapeCost":
        [cost] = cls.of_kinds(workload, shape, [layer])
        return cost

    @classmethod
    def of_kinds(cls, workload: Workload, shape: BlockShape, kinds: Iterable[Layer]) -> list["ShapeCost"]:
        workload = shape.of(workload)
        spec, layout, software, any_cost = workload.spec, workload.layout, workload.software, workload.block_cost
        logits, sent = loss_peak(spec, layout, software, any_cost.tokens), p2p_bytes(workload)
        costs = []
        for layer in kinds:
            activations = SavedByBlock(
                spec=spec,
                layer=layer,
                layout=layout,
                software=software,
                tokens=any_cost.tokens,
                seq=workload.seq,
                activation_bytes=any_cost.activation_bytes,
                imbalance=1.0,
            )
            costs.append(cls(any_cost.of(layer), activations, logits, sent))
        return costs

    def under(self, recompute: Recompute) -> "ShapeCost":
        """The same but for recompute."""
        if recompute == self.cost.layout.recompute:
            return self
        return replace(self, cost=self.cost.under(structs.replace(self.cost.layout, recompute=recompute)))

    @property
    def with_split_backward(self) -> BlockCost:
        """The block cost under a schedule that splits backward, if that makes a difference."""
        if self.cost.layout.tp == 1:
            return self.cost
        return self.cost.under(structs.replace(self.cost.layout, schedule=SPLIT_BACKWARD_SCHEDULE))


def shape_costs(
    workload: Workload, shapes: Iterable[BlockShape], kinds: Collection[Layer]
) -> Iterator[list[ShapeCost]]:
    """For each shape, one for each kind of layer. What recompute does not decide is worked out once for shapes that
    differ in it alone and follow each other."""
    last: tuple[BlockShape, list[ShapeCost]] | None = None
    for shape in shapes:
        if last is None or last[0] != shape._replace(recompute=last[0].recompute):
            last = shape, ShapeCost.of_kinds(workload, shape, kinds)
        yield [cost.under(shape.recompute) for cost in last[1]]


class PipelineArrays(NamedTuple):
    schedule: ScheduleInfo
    chunks: int

    @property
    def both_ends(self) -> bool:
        """Whether one rank has the first and the last stage."""
        return self.chunks > 1 and self.schedule.bent


class Choices(NamedTuple):
    """Arrays of one length, an element a combination."""

    tp: Array
    pp: Array
    cp: Array
    dp: Array
    zero: Array
    samples: Array
    microbatches: Array
    shape: Array  # index into a list of Shapes
    pipeline: Array  # index into a list of Pipelines

    def rows(self, rows: Array) -> "Choices":
        """Some of them."""
        return Choices(*(column[rows] for column in self))


ELEMENTS_AT_ONCE = 1 << 14  # whose arrays stay in a core's cache while the formulas go over them


def by_pipeline(of: Choices) -> Iterator[Array]:
    """The elements in parts that have the same pp and, beyond one rank, the same pipeline; none too long."""
    first, at = unlike(of.pp, np.where(of.pp == 1, 0, 1 + of.pipeline))
    ends = np.cumsum(np.bincount(at, minlength=len(first)))
    order = np.argsort(at.astype(np.uint16), kind="stable")  # in linear time
    for begin, end in pairwise([0, *ends.tolist()]):
        for start in range(begin, end, ELEMENTS_AT_ONCE):
            yield order[start : min(end, start + ELEMENTS_AT_ONCE)]


class BlockArrays(NamedTuple):
    """Seconds and bytes of one block and of the ends, for a microbatch of a shape; `Columns` of these for many."""

    forward: float
    backward: float
    computing: float  # seconds of forward that are no collective's: ZeRO 3's can hide behind them,
    computing_back: float  # and of backward; the collectives of recomputation count
    waiting: float  # seconds of both in which the device waits for the host: collectives find the time there
    inter_node_backward: float  # seconds of backward in which tp or cp holds the node's ports
    unhidden: float  # seconds that a schedule which splits backward adds: tp has nothing to hide behind
    ends: float
    saved: float  # activations of a microbatch
    # Bytes of backward beside what is saved: recomputed activations, gathered weights, gradients being reduced.
    transient: float
    logits: float
    p2p_bytes: float
    full: float  # 1 where recompute is
    paired: float = 0.0  # seconds of both passes that joined pairs hide, at most

    @classmethod
    def of(cls, workload: Workload, shape: BlockShape, layer: Layer) -> "BlockArrays":
        """One block. `workload` has one dp rank's microbatch as its batch."""
        return cls.in_shape(ShapeCost.of(workload, shape, layer))

    @classmethod
    def in_shape(cls, shape: ShapeCost) -> "BlockArrays":
        cost, block, recompute = shape.cost, shape.cost.block, shape.cost.layout.recompute
        saved = shape.activations.under(recompute).total
        recomputed = shape.activations.without_recompute.total - saved
        return cls(
            forward=block.forward.total,
            backward=block.dgrad.total + block.wgrad.total,
            computing=computing(block)[0],
            computing_back=computing(block)[1],
            waiting=waiting(cost.software, block),
            inter_node_backward=cost.inter_node_backward_seconds,
            unhidden=shape.with_split_backward.block.dgrad.total - block.dgrad.total,
            ends=sum(part.total for part in (*cost.head_and_loss, *cost.embedding)),
            saved=saved,
            transient=recomputed + mlp_backward_bytes(cost) + cp_buffer_bytes(cost),
            logits=shape.logits,
            p2p_bytes=shape.p2p_bytes,
            full=recompute == "full",
        )


class Columns:
    """`Columns(BlockArrays, table, at).saved`: a row of a table by its name, for many elements, each of which has a
    column. Gathered when asked for: formulas of memory need few of them."""

    def __init__(self, names: type[NamedTuple], table: Array, at: Array) -> None:
        self._names, self._table, self._at = names._fields, table, at

    def __getattr__(self, name: str) -> Array:
        if name not in self._names:
            raise AttributeError(name)
        values: Array = self._table[self._names.index(name)][self._at]
        setattr(self, name, values)
        return values


def shape_tables(
    workload: Workload,
    shapes: list[BlockShape],
    at: Array,
    numbers: Mapping[Layer, Callable[[ShapeCost], tuple[float, ...]]],
) -> dict[Layer, Array]:
    """Of each kind of layer, [fields, shapes] the numbers of the shapes whose indices are in `at`; of others zeros."""
    indices = used(at)
    rows: dict[Layer, list[tuple[float, ...]]] = {layer: [] for layer in numbers}
    for costs in shape_costs(workload, [shapes[index] for index in indices], numbers):
        for (layer, of), cost in zip(numbers.items(), costs, strict=True):
            rows[layer].append(of(cost))
    tables = {layer: np.zeros((len(own[0]), len(shapes))) for layer, own in rows.items()}
    for layer, own in rows.items():
        tables[layer][:, indices] = np.array(own).T
    return tables


def used(numbers: Array) -> list[int]:
    """The numbers in an array of small ones, in order: np.unique without a sort."""
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found


def computing(block: PassTimes) -> tuple[float, float]:
    """Seconds of a block's passes behind which `BlockCost` hides ZeRO 3's collectives."""
    forward, backward = (part.gemm + part.attention + part.memory for part in (block.forward, block.dgrad))
    return forward, backward + block.dgrad.recompute + block.wgrad.gemm


def waiting(software: SoftwareProfile, block: PassTimes) -> float:
    """Seconds in which a device waits for its host; a CPU is its own host, and waits for nothing."""
    return 0.0 if software.computes_itself else block.forward.host + block.dgrad.host


@dataclass(frozen=True)
class LinkArrays:
    """The links of many layouts at once."""

    topologies: list[Topology]  # that differ in where ranks are
    at: Array  # which of them an element has
    tables: dict[Any, Any] = field(default_factory=dict)  # of the topologies, made when first asked for

    @classmethod
    def of(cls, workload: Workload, of: Choices, ep: Array | int = 1) -> "LinkArrays":
        # dp is what is left of the world.
        first, at = unlike(of.tp, of.cp, of.pp, np.broadcast_to(ep, of.tp.shape))
        degrees = (of.dp, of.tp, of.pp, of.cp, np.broadcast_to(ep, of.tp.shape))
        topologies = []
        for row in np.column_stack([column[first] for column in degrees]).tolist():
            dp, tp, pp, cp, spread = row
            topologies.append(replace(workload, layout=Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=spread), batch=1).topology)
        return cls(topologies, at)

    def rows(self, rows: Array) -> "LinkArrays":
        """Those of some elements."""
        return LinkArrays(self.topologies, self.at[rows], self.tables)

    @property
    def device(self) -> Device:
        return self.topologies[0].device

    @cached_property
    def reaches(self) -> dict[str, Reach]:
        """Of the axes that ZeRO shards over."""
        return {axis: Reach(*self._reach(axis)[:, self.at]) for axis in ("fsdp", "efsdp")}

    def _reach(self, axis: str) -> Array:
        if axis not in self.tables:
            self.tables[axis] = np.array([links.reaches[axis] for links in self.topologies]).T
        return np.asarray(self.tables[axis])

    def time(self, kind: Kind, axis: str, payload: Any, calls: Any = 1) -> Any:
        """As `Topology.time`; for all-reduces the ring's time, though a tree may be quicker."""
        rounds = 2 if kind == "all-reduce" else 1
        latency, rate = self._line("send" if kind == "send" else "all-gather", axis)
        return calls * rounds * (latency + payload * rate)

    def _line(self, kind: Kind, axis: str) -> tuple[Array, Array]:
        """Seconds before the first byte, and of each."""
        if (kind, axis) not in self.tables:
            small, large = (np.array([links.time(kind, axis, n) for links in self.topologies]) for n in (1.0, 1e9))
            self.tables[kind, axis] = small, (large - small) / 1e9
        if (kind, axis) not in self._lines:
            latency, rate = self.tables[kind, axis]
            self._lines[kind, axis] = latency[self.at], rate[self.at]
        return self._lines[kind, axis]

    @cached_property
    def _lines(self) -> dict[tuple[Kind, str], tuple[Array, Array]]:
        return {}


def unlike(*columns: Array) -> tuple[Array, Array]:
    """Rows of columns of small numbers: where each that differs comes first, and for every row which of them it is. As
    `np.unique`, without a sort of all rows."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values = used(column) if len(column) else [0]
        place = np.zeros(values[-1] + 1, dtype=np.int64)
        place[values] = np.arange(len(values))
        key = key * len(values) + place[column]
    first = np.full(int(key.max(initial=0)) + 1, -1, dtype=np.int64)
    first[key[::-1]] = np.arange(len(key))[::-1]  # the first row of each comes last, and stays
    found = np.flatnonzero(first >= 0)
    place = np.zeros(len(first), dtype=np.int64)
    place[found] = np.arange(len(found))
    return first[found], place[key]


@dataclass(frozen=True)
class Closed:
    """The inputs of the formulas: the choices, and arrays for the blocks, all of one kind. Several kinds of blocks are
    parts of an `UnlikeClosed` (closed_forms_by_rank.py)."""

    workload: Workload
    of: Choices
    block: Any  # arrays with the names of `BlockArrays`
    block_params: ParamShare  # parameters of a block on one rank
    pipelines: list[PipelineArrays]
    links: LinkArrays

    @property
    def alone(self) -> Array:
        return self.of.pp == 1

    @property
    def chunks(self) -> Array:
        return np.where(self.alone, 1, np.array([pipeline.chunks for pipeline in self.pipelines])[self.of.pipeline])

    @property
    def zero(self) -> ZeroCost:
        return ZeroCost(self.workload.spec, self.workload.software, self.links)

    @property
    def parameters(self) -> ParamShare:
        """Parameters of the pipeline rank with the most, on one tp rank."""
        spec, several = self.workload.spec, np.ceil(self.workload.spec.layers / self.of.pp)
        table = spec.vocab * spec.hidden / self.of.tp
        full = spec.layers * self.block_params.dense + table * (1 if spec.tied else 2)
        layers: Any = np.where(self.alone, spec.layers, several)
        dense: Any = np.where(self.alone, full, several * self.block_params.dense + table)
        return ParamShare(dense, layers * self.block_params.experts)

    def fact(self, name: str) -> Array:
        """A fact of each one's schedule; layouts of one stage have none."""
        facts = np.array([getattr(pipeline.schedule, name) for pipeline in self.pipelines])[self.of.pipeline]
        return np.where(self.alone, facts.dtype.type(0), facts)

    def seconds(self) -> Array:
        """Seconds of a step."""
        rank = self._rank() + self.gathering() * self.workload.spec.layers / self.of.pp
        # All ranks as if they took as long as the busiest.
        return self.step(rank, self.of.pp * rank) + self.after()

    def step(self, rank: Array, all_ranks: Array) -> Array:
        """Seconds of a step's passes; `rank` and `all_ranks` are a microbatch's, on the busiest rank and in sum."""
        overlap_fraction = self.workload.software.hides("pp")
        passes = np.asarray(self.form.seconds(rank, all_ranks, self.sending(), overlap_fraction))
        return passes + self.workload.software.host_step

    @property
    def each(self) -> Array:
        """Seconds of a microbatch in a layer."""
        return self.block.forward + self.block.backward + np.where(self.fact("splits"), self.block.unhidden, 0.0)

    @property
    def unit(self) -> Any:
        """Layers by which a rank's share grows: one for each of its stages."""
        return self.chunks

    def _rank(self) -> Array:
        """Seconds of a microbatch on the busiest rank. Ranks hold whole layers, and the head counts as some."""
        layers, ends, each, pp = self.workload.spec.layers, self.block.ends, self.each, self.of.pp
        most = np.minimum(np.ceil((layers + ends / each) / (pp * self.unit)) * self.unit, layers)
        return np.maximum((layers * each + ends) / pp, np.where(self.alone, 0, most) * each)

    def gathering(self) -> Array:
        """ZeRO 3's exposed collectives of a microbatch in a block."""
        block = self.block
        free = np.maximum(0.0, block.computing_back - block.inter_node_backward)
        exposed = sum(
            self.zero.exposed_zero3_in_block(self.block_params, block.computing, free, full_recompute=block.full)
        )
        return np.where(self.of.zero == 3, np.maximum(0.0, exposed - block.waiting), 0.0)

    @property
    def form(self) -> PipelineForm:
        facts = (self.fact(name) for name in ("fill", "waits", "refills"))
        return PipelineForm(self.of.pp, self.of.microbatches, self.chunks, *facts)

    def sending(self) -> Array:
        """Seconds of a message between stages."""
        return np.asarray(self.links.time("send", "pp", self.block.p2p_bytes))

    def after(self) -> Array:
        """Seconds of the optimizer, and of collectives of gradients and weights that nothing hides."""
        of, zero, count, layers = self.of, self.zero, self.parameters, self.workload.spec.layers / self.of.pp
        forward, free = (
            self.block.forward * layers,
            np.maximum(0.0, self.block.backward - self.block.inter_node_backward) * layers,
        )
        left = zero.exposed_sync(count, of.zero, of.microbatches, forward, free)
        ends = zero.exposed_zero3_outside_blocks(count, of.tp, of.microbatches, forward / self.chunks)
        return np.asarray(zero.optimizer(count, of.zero) + np.where(of.zero == 3, ends, left))

    def memory(self) -> Array:
        """Bytes of the fullest rank."""
        share, flying = self.workload.spec.layers / self.of.pp, self._flying()
        # The ends that ZeRO 3 has gathered are left out. Of large microbatches gradients that do not exist at the peak
        # outweigh them, and a layout that is pruned for too much memory is not looked at again.
        first = self.block.saved * flying * share + self.block.transient + self.gathered()
        # The last stage has the logits and, unless ranks have several stages, one microbatch.
        last = self.block.saved * np.where(self.chunks > 1, flying, 1) * share + self.block.logits
        return self.taken(self.parameters, flying, np.maximum(first, last))

    def taken(self, parameters: ParamShare, flying: Array, moment: Array) -> Array:
        """Bytes of a rank with these parameters and microbatches in flight, and so many bytes at its worst moment."""
        messages = np.where(self.alone, 0.0, (1 + 2 * self.chunks + flying * self.chunks) * self.block.p2p_bytes)
        state = sum(part.total for part in self.zero.states(parameters, self.of.zero).values())
        allocated = state + moment + messages + self.workload.software.bucket_bytes
        return np.asarray(allocated * (1 + FRAGMENTATION) + CUDA_CONTEXT_BYTES)

    def _flying(self) -> Array:
        """Microbatches that the first rank holds."""
        flying = np.ones(len(self.of.tp))
        for index, (schedule, chunks) in enumerate(self.pipelines):
            at = (self.of.pipeline == index) & ~self.alone
            m = self.of.microbatches[at]
            flying[at] = np.minimum(m, schedule.live(self.of.pp[at], m, chunks))
        return flying

    def gathered(self) -> Array:
        """Bytes of gathered weights and of gradients being reduced: ZeRO 3 and 2."""
        software, reaches = self.workload.software, self.links.reaches
        summed = sum(
            part * (reaches[axis].ranks > 1) for axis, part in zip(("fsdp", "efsdp"), self.block_params, strict=True)
        )
        block = summed * software.gradient_bytes
        two = np.where(self.of.zero == 2, np.maximum(block, 2 * block - self.block.saved), 0.0)
        three = self.block_params.total * (2 * software.weight_bytes + software.gradient_bytes) * (summed > 0)
        return np.where(self.of.zero == 3, three, two)


# ---- experts ---------------------------------------------------------------------------------------------------------
# The search's space of a model with experts: every layout of a dense one, with every ep that divides its ranks. Their
# closed forms are in closed_forms_moe.py.


DISPATCHES: tuple[Dispatch, ...] = ("alltoall", "allgather")


class EpChoices(NamedTuple):
    """Arrays beside `Choices`."""

    ep: Array
    dispatch: Array
