"""What one rank sends in one training step, in closed form. `fivefold verify` holds it against what runs.

    expected_traffic(spec, layout, seq=4096, batch=512, dtype="bfloat16")     # rows: axis, kind, calls, payload, wire
    expected_traffic(..., coords=RankCoords.of(layout, rank=5))               # of another rank than rank 0
    layer_collectives(spec, layout, seq=4096, batch=512, dtype="bfloat16", layer=17)     # of one layer, in order

The blocks' part comes from `cost/block_collectives.py`, once for each microbatch and layer. Here is the rest of a step:
embedding and head, pipeline messages, gradients and weights, and a few scalars.

Textbook cases: dp, one all-reduce of the weights' M bytes, 2M(N-1)/N on the wire; ZeRO 3 with one microbatch,
3M(N-1)/N; tp, four all-reduces of BSE a layer; pp, BSE forward and BSE back per microbatch and boundary.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import NamedTuple, Self

from fivefold.cost.block_collectives import BlockCollectives, Collective, When
from fivefold.cost.collective_time import Kind, Traffic, total, wire
from fivefold.cost.matrices import MatrixCost
from fivefold.cost.model_state import ADAMW
from fivefold.cost.routing import Rows, even_rows
from fivefold.layout.bucket_plan import MIN_BUCKET_ELEMENTS, BucketParams, buckets
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RANK0, RankCoords
from fivefold.layout.sharding import LocalParam, local_params
from fivefold.layout.stages import Stage, schedule_of, stages_of
from fivefold.optim.base import OptimizerConfig
from fivefold.spec.model import ModelSpec
from fivefold.spec.pattern import Layer
from fivefold.support.dtypes import DTYPE_BYTES, wide_bytes


class _CollectiveRow(NamedTuple):
    """`calls` collectives of one kind over one axis. Axes of one rank are also listed, and left out at the end."""

    axis: str
    kind: Kind
    calls: int
    payload: int  # bytes of one call
    sent: int | None = None  # bytes of the payload to other ranks, if they get unequal shares
    per_microbatch: bool = False  # of gradients and weights: every microbatch has its share of the calls


@dataclass(frozen=True)
class _Inputs:
    """The inputs of the formulas below, for one rank."""

    spec: ModelSpec
    layout: Layout
    coords: RankCoords
    stages: tuple[Stage, ...]  # of this rank
    splits_backward: bool  # the schedule computes the weight gradients of linears apart from the rest
    tokens: int  # of a microbatch on this cp rank
    compute_bytes: int  # of an element in the dtype of weights and activations
    accum_bytes: int  # of an element in the dtype of gradients and sums
    min_bucket_elements: int

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        layout: Layout,
        seq: int,
        batch: int,
        dtype: str,
        *,
        coords: RankCoords,
        min_bucket_elements: int,
        splits_backward: bool | None = None,
    ) -> "_Inputs":
        """`splits_backward`: None is what the schedule's name says."""
        stages = stages_of(spec, layout, seq)
        if splits_backward is None:
            splits_backward = layout.splits_backward
            if layout.record.uses_stage_times:  # `auto` splits backward passes or not, by the costs of its stages
                splits_backward = schedule_of(spec, layout, seq).splits
        return cls(
            spec=spec,
            layout=layout,
            coords=coords,
            stages=tuple(stages[stage] for stage in layout.placement.of_rank[coords.pp]),
            splits_backward=splits_backward,
            tokens=batch // layout.size("batch") // layout.microbatches * (seq // layout.cp),
            compute_bytes=DTYPE_BYTES[dtype],
            accum_bytes=wide_bytes(dtype),
            min_bucket_elements=min_bucket_elements,
        )

    def block(self, layer: Layer | None = None) -> BlockCollectives:
        return BlockCollectives(
            spec=self.spec,
            layout=self.layout,
            tokens=self.tokens,
            compute_bytes=self.compute_bytes,
            accum_bytes=self.accum_bytes,
            layer=layer or Layer(),
        )

    @property
    def mixed_precision(self) -> bool:
        """Whether weights are rounded to the compute dtype. Parameters that are `full_precision` never are."""
        return self.compute_bytes < self.accum_bytes

    @property
    def tied_across_stages(self) -> bool:
        """Whether two pipeline ranks hold copies of tied parameters."""
        return self.layout.size("embedding") > 1

    @property
    def message_bytes(self) -> int:
        """Bytes of the residual stream, as it goes to the next pipeline rank; under sp this rank's tokens."""
        return self.block().states // self.layout.sp_degree

    def stage_params(self) -> Iterator[list[LocalParam]]:
        """The parameters of each stage. An embedding that first and last stage share on one rank is the first's."""
        params, seen = local_params(self.spec, self.layout, self.coords.tp, self.coords.ep), set[str]()
        for stage in self.stages:
            names = [name for name in stage.names(self.spec) if name not in seen]
            seen.update(names)
            yield [params[name] for name in names]


def expected_traffic(
    spec: ModelSpec,
    layout: Layout,
    seq: int,
    batch: int,
    dtype: str,
    *,
    coords: RankCoords = RANK0,
    min_bucket_elements: int = MIN_BUCKET_ELEMENTS,
    loss_sums: int = 1,
    balance_loss: bool = False,
    routed_rows: Rows | None = None,
    splits_backward: bool | None = None,
    keep_ep_axis: bool = False,
    optimizer: OptimizerConfig = ADAMW,
) -> list[Traffic]:
    """One step of one rank.

    `min_bucket_elements` are enough for a gradient bucket. `routed_rows` are those that the rank sends to experts,
    receives and keeps; None: as many each way, to any. `splits_backward`: whether the schedule has backward passes in
    two halves; None: as its name says. The measured counter names an axis by its set of ranks, so ep may be counted as
    dp or cp. `keep_ep_axis`: list ep as ep all the same. An `optimizer` that reads whole matrices sends them.
    """
    inputs = _Inputs.of(
        spec,
        layout,
        seq,
        batch,
        dtype,
        coords=coords,
        min_bucket_elements=min_bucket_elements,
        splits_backward=splits_backward,
    )
    samples = batch // layout.size("batch") // layout.microbatches
    sent = chain(
        _scalars(spec),
        _zero_3(inputs) if layout.fully_shards(spec) else _zero_0_to_2(inputs),
        _blocks(inputs, routed_rows, balance_loss_samples=samples if balance_loss else 0),
        _embedding_and_head(inputs, loss_sums),
        _pipeline(inputs),
        _matrices(inputs, optimizer, seq, dtype),
    )
    return total(
        Traffic(
            axis="ep"
            if keep_ep_axis and row.axis == "ep"
            else layout.same_axis(row.axis, experts=spec.experts is not None),
            kind=row.kind,
            calls=row.calls,
            payload=row.calls * row.payload,
            wire=row.calls * wire(row.kind, row.payload, size, row.sent),
        )
        for row in sent
        if (size := layout.size(row.axis)) > 1 and row.calls
    )


FLOAT64 = 8  # bytes


def _scalars(spec: ModelSpec) -> list[_CollectiveRow]:
    """The loss, over the ranks that have other tokens and to the stages that do not compute it. Then, over all ranks,
    the square of the gradient norm, whether a rank wants to stop, rank 0's loss, and of experts the loads and the
    losses of their routers."""
    over_world = 3
    if spec.experts is not None:
        over_world += len(spec.routed_layers) * spec.experts.count
        over_world += 2  # the router's balance loss and z-loss
    return [
        _CollectiveRow("dp_cp", "all-reduce", 1, FLOAT64),
        _CollectiveRow("pp", "all-reduce", 1, FLOAT64),
        _CollectiveRow("world", "all-reduce", 1, over_world * FLOAT64),
    ]


# ---- microbatches ---------------------------------------------------------------------------------------------------


def _blocks(inputs: _Inputs, routed_rows: Rows | None, balance_loss_samples: int) -> Iterator[_CollectiveRow]:
    """Blocks of a kind send the same as each other; blocks with experts differ by the tokens that their experts
    receive."""
    spec, layout = inputs.spec, inputs.layout
    layers = [layer for stage in inputs.stages for layer in stage.layers]
    for kind, count in spec.counted(layer for layer in layers if not spec.kinds(layer).routed).items():
        yield from _repeated(inputs.block(kind), count * layout.microbatches)
    moe_layers = [layer for layer in layers if spec.kinds(layer).routed]
    if moe_layers and routed_rows is None:
        routed_rows = even_rows(spec, layout, inputs.tokens, moe_layers, inputs.coords)
    kinds_of_rows = [spec.kinds(layer) for _ in range(layout.microbatches) for layer in moe_layers]
    rows = zip(kinds_of_rows, routed_rows or (), strict=True) if moe_layers else ()
    for (kind, routed), times in Counter(rows).items():
        block = replace(inputs.block(kind), rows=routed, balanced=balance_loss_samples)
        yield from _repeated(block, times)


def _repeated(block: BlockCollectives, times: int) -> Iterator[_CollectiveRow]:
    """A block's passes, `times` over."""
    if times:
        for sent in chain(block.forward(), block.recomputed(), block.backward()):
            yield _CollectiveRow(sent.axis, sent.kind, times * sent.calls, sent.payload, sent.sent)


def _embedding_and_head(inputs: _Inputs, loss_sums: int) -> Iterator[_CollectiveRow]:
    block = inputs.block()
    embedding = block.embedding() if any(stage.first for stage in inputs.stages) else ()
    head = chain(block.head(), block.loss(loss_sums)) if any(stage.last for stage in inputs.stages) else ()
    for sent in chain(embedding, head):
        yield _CollectiveRow(sent.axis, sent.kind, inputs.layout.microbatches * sent.calls, sent.payload)


def _pipeline(inputs: _Inputs) -> Iterator[_CollectiveRow]:
    """The residual stream over every boundary to another rank, and its gradient back."""
    placement = inputs.layout.placement
    outgoing = sum(placement.owner[channel.source] == inputs.coords.pp for channel in placement.channels)
    yield _CollectiveRow("pp", "send", outgoing * inputs.layout.microbatches, inputs.message_bytes)


# ---- gradients and weights ------------------------------------------------------------------------------------------


def _zero_0_to_2(inputs: _Inputs, layer: int | None = None) -> Iterator[_CollectiveRow]:
    """Buckets, each stage's its own. `layer`: only the buckets that have parameters of that layer.

    Shards are padded to the longest, so a reduce-scatter or all-gather over N ranks is handed N times that. Gradients
    that are summands over tp, or over the two copies of a tied embedding, are summed once a step: the shard alone,
    where there is one.
    """
    layout, compute_bytes, accum_bytes = inputs.layout, inputs.compute_bytes, inputs.accum_bytes
    for params in inputs.stage_params():
        groups = buckets(
            params,
            min_elements=inputs.min_bucket_elements,
            split_backward=inputs.splits_backward,
            separate_tied=inputs.tied_across_stages,
            low_precision=layout.zero > 0 and inputs.mixed_precision,
        )
        for bucket in groups:
            if layer is not None and layer not in bucket.units:
                continue
            axis, ranks = bucket.fsdp_axis, layout.size(bucket.fsdp_axis)
            zero = layout.zero if ranks > 1 else 0
            if zero == 0:
                yield _CollectiveRow(axis, "all-reduce", 1, bucket.size() * accum_bytes)
            else:
                weight_bytes = accum_bytes if bucket.full_precision else compute_bytes
                reductions = layout.microbatches if zero == 2 else 1
                payload = bucket.padded(ranks) * accum_bytes
                yield _CollectiveRow(axis, "reduce-scatter", reductions, payload, per_microbatch=zero == 2)
                yield _CollectiveRow(axis, "all-gather", 1, bucket.padded(ranks) * weight_bytes)
            shard_elements = bucket.padded(ranks) // ranks if zero else bucket.size()
            yield _CollectiveRow("tp", "all-reduce", int(bucket.partial), shard_elements * accum_bytes)
            yield _CollectiveRow("embedding", "all-reduce", int(bucket.tied), shard_elements * accum_bytes)


def _matrices(inputs: _Inputs, optimizer: OptimizerConfig, seq: int, dtype: str) -> Iterator[_CollectiveRow]:
    """Parts of matrices to the ranks that update them, and back. What a rank keeps for itself is not in the payload."""
    for call in MatrixCost.of(inputs.spec, inputs.layout, seq, dtype, optimizer, inputs.coords).calls:
        yield _CollectiveRow("stage", call.kind, 1, call.payload, call.sent)


def _zero_3(inputs: _Inputs) -> Iterator[_CollectiveRow]:
    """FSDP2. A unit is a block without its experts, a block's experts, or a stage's embedding, last norm and head.
    Shards are padded like those of buckets.

    A unit is all-gathered for forward and again for backward, and reduce-scattered, in every microbatch; recompute
    finds its weights gathered. Once a step shards are summed over `replicate`, and those of a tied embedding over its
    two copies. A gradient that is a summand over tp is summed before it is reduce-scattered, parameter by parameter, in
    every microbatch.

    Two kinds of parameters go by buckets instead: linears whose weight gradients are deferred to a pass of their own,
    as in stage 2, and parameters that stay in full precision where others are rounded, once a step, as in stage 0.
    """
    layout, microbatches, accum_bytes = inputs.layout, inputs.layout.microbatches, inputs.accum_bytes
    for params in inputs.stage_params():
        gathered: Counter[tuple[str, int | None]] = Counter()  # elements of a shard, by axis and layer
        reduced: Counter[tuple[str, int | None]] = Counter()
        for param in params:
            if inputs.mixed_precision and param.parameter.full_precision:
                continue
            ranks, unit = layout.size(param.fsdp_axis), (param.fsdp_axis, param.parameter.layer)
            gathered[unit] += param.share_size(ranks)
            if inputs.splits_backward and param.parameter.deferred:
                continue
            reduced[unit] += param.share_size(ranks)
            calls, payload = microbatches * param.tp.partial, param.size * inputs.compute_bytes
            yield _CollectiveRow("tp", "all-reduce", calls, payload, per_microbatch=True)
            if inputs.tied_across_stages and param.parameter.tied:
                shard_elements = math.prod(map(len, param.share(ranks, inputs.coords.fsdp)))
                yield _CollectiveRow("embedding", "all-reduce", 1, shard_elements * accum_bytes)
        for (axis, _), shard_elements in gathered.items():
            padded = layout.size(axis) * shard_elements
            yield _CollectiveRow(
                axis, "all-gather", 2 * microbatches, padded * inputs.compute_bytes, per_microbatch=True
            )
        for (axis, _), shard_elements in reduced.items():
            padded = layout.size(axis) * shard_elements
            yield _CollectiveRow(axis, "reduce-scatter", microbatches, padded * accum_bytes, per_microbatch=True)
            yield _CollectiveRow("replicate", "all-reduce", 1, shard_elements * accum_bytes)
        groups = buckets(
            params,
            min_elements=inputs.min_bucket_elements,
            split_backward=inputs.splits_backward,
            low_precision=inputs.mixed_precision,
        )
        for bucket in groups:
            if bucket.deferred or bucket.full_precision:
                yield from _zero_3_bucket(inputs, bucket)


def _zero_3_bucket(inputs: _Inputs, bucket: BucketParams) -> Iterator[_CollectiveRow]:
    """Gradients that ZeRO 3 reduces by buckets: of deferred linears, or in full precision (`full_precision`)."""
    layout, accum_bytes = inputs.layout, inputs.accum_bytes
    axis, ranks = bucket.fsdp_axis, layout.size(bucket.fsdp_axis)
    shard_elements = bucket.size() if bucket.full_precision else bucket.padded(ranks) // ranks
    if bucket.full_precision:
        yield _CollectiveRow(axis, "all-reduce", 1, shard_elements * accum_bytes)
    else:
        payload = ranks * shard_elements * accum_bytes
        yield _CollectiveRow(axis, "reduce-scatter", layout.microbatches, payload, per_microbatch=True)
    yield _CollectiveRow("tp", "all-reduce", int(bucket.partial), shard_elements * accum_bytes)
    yield _CollectiveRow("replicate", "all-reduce", 1, shard_elements * accum_bytes)


# ---- one layer, in order --------------------------------------------------------------------------------------------


def layer_collectives(
    spec: ModelSpec,
    layout: Layout,
    seq: int,
    batch: int,
    dtype: str,
    layer: int,
    min_bucket_elements: int = MIN_BUCKET_ELEMENTS,
) -> list[Collective]:
    """The collectives of a layer on the first rank that has it, in order: for one microbatch, and once a step for all.
    `min_bucket_elements`: elements that are enough for a gradient bucket."""
    stage = next(stage for stage in stages_of(spec, layout, seq) if layer in stage.layers)
    coords = RankCoords(pp=layout.placement.owner[stage.index])
    inputs = _Inputs.of(spec, layout, seq, batch, dtype, coords=coords, min_bucket_elements=min_bucket_elements)
    block = inputs.block(spec.kinds(layer))
    if block.moe:
        block = replace(block, rows=even_rows(spec, layout, inputs.tokens, [layer], coords)[0])
    params = _LayerCollectives.of(inputs, stage, layer)
    to_next = Collective("forward", "the stage's output, to the next", "pp", "send", 1, inputs.message_bytes)
    to_previous = Collective("backward", "its gradient, to the stage before", "pp", "send", 1, inputs.message_bytes)
    in_order = chain(
        params.gathered("forward"),
        block.forward(),
        [to_next] if layer == stage.layers[-1] and not stage.last else [],
        params.gathered("backward"),
        block.recomputed(),
        block.backward(),
        params.gradients(),
        [to_previous] if layer == stage.layers[0] and not stage.first else [],
        params.step_end(),
    )
    return [sent for sent in in_order if sent.calls and sent.payload and layout.size(sent.axis) > 1]


class _LayerCollectives(NamedTuple):
    """The collectives of a layer's weights and gradients."""

    collectives: list[_CollectiveRow]

    @classmethod
    def of(cls, inputs: _Inputs, stage: Stage, layer: int) -> Self:
        one_layer = replace(inputs, stages=(Stage(stage.index, range(layer, layer + 1), first=False, last=False),))
        zero_3 = inputs.layout.fully_shards(inputs.spec)
        return cls(list(_zero_3(one_layer) if zero_3 else _zero_0_to_2(inputs, layer)))

    def gathered(self, when: When) -> Iterator[Collective]:
        """ZeRO 3 gathers weights for either pass."""
        for row in self.collectives:
            if row.per_microbatch and row.kind == "all-gather":
                yield Collective(when, f"weights of {_axis_label(row.axis)}", row.axis, row.kind, 1, row.payload)

    def gradients(self) -> Iterator[Collective]:
        """What ZeRO 3 and 2 reduce in every microbatch, and ZeRO 3 before that over tp."""
        return self._reduced(
            "backward", (row for row in self.collectives if row.per_microbatch and row.kind != "all-gather")
        )

    def step_end(self) -> Iterator[Collective]:
        """Reductions of shards or whole gradients, and the new weights. A reduction starts while the last backward
        passes run."""
        once = [row for row in self.collectives if not row.per_microbatch]
        yield from self._reduced("once a step", (row for row in once if row.kind != "all-gather"))
        for row in once:
            if row.kind == "all-gather":
                what = f"new weights of {_axis_label(row.axis)}"
                yield Collective("once a step", what, row.axis, row.kind, row.calls, row.payload)

    def _reduced(self, when: When, rows: Iterable[_CollectiveRow]) -> Iterator[Collective]:
        """Merges adjacent rows of the same axis, kind and payload: tp has one per parameter."""
        called = (row for row in rows if row.calls)
        for (axis, kind), group in groupby(called, key=lambda row: (row.axis, row.kind)):
            payloads = [row.payload for row in group]
            for payload in sorted(set(payloads)):
                calls = payloads.count(payload)
                yield Collective(when, f"gradients of {_axis_label(axis)}", axis, kind, calls, payload)


def _axis_label(axis: str) -> str:
    """The parameters that are gathered or reduced over an axis."""
    if axis == "tp":
        return "what tp ranks share"
    return "its experts" if axis == "efsdp" else "the layer"


def display_axis(layout: Layout, axis: str, kind: Kind) -> str:
    """The axis that a reader looks for. Bytes are counted by the first axis that has the same ranks, so experts'
    messages are counted under dp, cp, tp or the world where ep has their ranks; where other collectives of that kind
    are counted with them, both axes are named."""
    if layout.ep == 1 or axis == "ep" or axis != layout.same_axis("ep"):
        return axis
    kinds = ("all-to-all",) if layout.dispatch == "alltoall" else ("all-gather", "reduce-scatter")
    if kind not in kinds:
        return axis
    is_ulysses = axis == "cp" and layout.cp_kind == "ulysses"
    return "ep" if kind == "all-to-all" and not is_ulysses else f"{axis}, ep"
