"""What one rank sends in one training step, in closed form. `fivefold verify` holds it against what runs.

    expected(spec, layout, seq=4096, batch=512, dtype="bfloat16")     # rows: axis, kind, calls, payload, wire
    expected(..., coords=RankCoords.of(layout, rank=5))               # of another rank than the first
    in_order(spec, layout, seq=4096, batch=512, dtype="bfloat16", layer=17)     # what one layer sends, one by one

The blocks' part is that of `cost/collectives.py`, once for each microbatch and layer; here is what stands around the
blocks: both ends, the messages of the pipeline, gradients and weights, and the numbers of a step.

Textbook cases: dp, one all-reduce of the weights' M bytes, 2M(N-1)/N on the wire; ZeRO 3 with one microbatch,
3M(N-1)/N; tp, four all-reduces of BSE a layer; pp, BSE forward and BSE back per microbatch and boundary.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import NamedTuple, Self

from fivefold.cost.collectives import BlockCollectives, Collective, When
from fivefold.cost.links import Kind, Traffic, total, wire
from fivefold.cost.memory import BYTES, wide_bytes
from fivefold.cost.routing import Rows, even_rows
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import MINIMUM, LocalParam, buckets, local_params
from fivefold.layout.stages import Stage, schedule_of, stages_of
from fivefold.spec.model import ModelSpec


class RankCoords(NamedTuple):
    """Where a rank stands, as far as it matters to what it sends."""

    tp: int = 0  # ranks along tp differ where the vocabulary does not divide
    pp: int = 0  # they have other stages
    fsdp: int = 0  # where the rows of a tied embedding do not divide
    ep: int = 0  # they have other experts
    efsdp: int = 0

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Self:
        """Of a global rank."""
        return cls(*(layout.position(axis, rank) for axis in cls._fields))


FIRST = RankCoords()
_Sent = tuple[str, Kind, int, int]  # axis, kind, calls, bytes of one call


@dataclass(frozen=True)
class _Step:
    """The numbers that the formulas below are made of."""

    spec: ModelSpec
    layout: Layout
    coords: RankCoords
    stages: tuple[Stage, ...]  # of this rank
    split: bool  # the schedule computes gradients of linears apart from the rest
    tokens: int  # of a microbatch on this cp rank
    compute: int  # bytes of an element
    accum: int
    minimum: int  # elements of a bucket

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
        minimum: int,
        splits: bool | None = None,
    ) -> "_Step":
        tokens = batch // layout.size("batch") // layout.microbatches * (seq // layout.cp)
        stages = stages_of(spec, layout, seq)
        own = tuple(stages[number] for number in layout.placement.of_rank[coords.pp])
        # `auto` splits the backward passes where its stages call for it; of the others one knows.
        split = layout.splits_backward if splits is None else splits
        if splits is None and layout.record.uses_stage_times:
            split = schedule_of(spec, layout, seq).splits
        return cls(spec, layout, coords, own, split, tokens, BYTES[dtype], wide_bytes(dtype), minimum)

    def block(self, moe: bool = False) -> BlockCollectives:
        return BlockCollectives(self.spec, self.layout, self.tokens, self.compute, self.accum, moe)

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded to compute with, but for those that never are."""
        return self.compute < self.accum

    @property
    def shared(self) -> bool:
        """Whether two ranks hold the copies of tied parameters."""
        return self.layout.size("embedding") > 1

    @property
    def message(self) -> int:
        """Bytes of the residual stream, as it goes to the next pipeline rank; under sp this rank's tokens."""
        return self.block().states // (self.layout.tp if self.layout.sp else 1)

    def held(self) -> Iterator[list[LocalParam]]:
        """The parameters of each stage. An embedding that both ends on one rank share is the first's."""
        params, seen = local_params(self.spec, self.layout, self.coords.tp, self.coords.ep), set[str]()
        for stage in self.stages:
            names = [name for name in stage.names(self.spec) if name not in seen]
            seen.update(names)
            yield [params[name] for name in names]


def expected(
    spec: ModelSpec,
    layout: Layout,
    seq: int,
    batch: int,
    dtype: str,
    *,
    coords: RankCoords = FIRST,
    minimum: int = MINIMUM,
    smoothing: bool = False,
    balance_loss: bool = False,
    rows: Rows | None = None,
    splits: bool | None = None,
    experts_apart: bool = False,
) -> list[Traffic]:
    """One step of one rank. `rows` are those that it sends to experts and receives; None: as many each way, to any.
    `splits`: whether the schedule has backward passes in two halves; None: as its name says.
    A counter knows axes by their ranks; `experts_apart` keeps what goes to experts under ep, whatever else has them."""
    step = _Step.of(spec, layout, seq, batch, dtype, coords=coords, minimum=minimum, splits=splits)
    samples = batch // layout.size("batch") // layout.microbatches
    sent = chain(
        _numbers(spec),
        _fully_sharded(step) if layout.fully_shards(spec) else _replicated(step),
        _blocks(step, rows, samples if balance_loss else 0),
        _ends(step, smoothing),
        _pipeline(step),
    )
    return total(
        Traffic(
            "ep" if experts_apart and axis == "ep" else layout.same_axis(axis),
            kind,
            calls,
            calls * payload,
            wire(kind, calls * payload, size),
        )
        for axis, kind, calls, payload in sent
        if (size := layout.size(axis)) > 1 and calls
    )


def _numbers(spec: ModelSpec) -> list[_Sent]:
    """The loss over the ranks that have other tokens and to those without any; the square of the gradient norm, and
    beside it whether a rank wants to stop, rank 0's loss, and the load of every expert. They are added up in float64.
    """
    loads = 0 if spec.experts is None else (spec.layers - spec.dense_layers) * spec.experts.count + 2
    return [("dp_cp", "all-reduce", 1, 8), ("pp", "all-reduce", 1, 8), ("world", "all-reduce", 1, 24 + 8 * loads)]


# ---- microbatches ---------------------------------------------------------------------------------------------------


def _blocks(step: _Step, rows: Rows | None, balanced: int) -> Iterator[_Sent]:
    """Blocks are alike, but for those of experts by the tokens that come to them."""
    spec, layout = step.spec, step.layout
    layers = [layer for stage in step.stages for layer in stage.layers]
    moe = [layer for layer in layers if spec.experts is not None and not spec.dense(layer)]
    yield from _times(step.block(), (len(layers) - len(moe)) * layout.microbatches)
    if moe and rows is None:
        rows = even_rows(spec, layout, step.tokens, moe, step.coords.tp)
    for row, times in Counter(rows if moe else ()).items():
        yield from _times(replace(step.block(moe=True), rows=row, balanced=balanced), times)


def _times(block: BlockCollectives, times: int) -> Iterator[_Sent]:
    if times:
        for sent in chain(block.forward(), block.recomputed(), block.backward()):
            yield sent.axis, sent.kind, times * sent.calls, sent.payload


def _ends(step: _Step, smoothing: bool) -> Iterator[_Sent]:
    block = step.block()
    first = block.embedding() if any(stage.first for stage in step.stages) else ()
    last = chain(block.head(), block.loss(smoothing)) if any(stage.last for stage in step.stages) else ()
    for sent in chain(first, last):
        yield sent.axis, sent.kind, step.layout.microbatches * sent.calls, sent.payload


def _pipeline(step: _Step) -> Iterator[_Sent]:
    """The residual stream over every boundary to another rank, and its gradient back."""
    placement = step.layout.placement
    leaving = sum(placement.owner[channel.source] == step.coords.pp for channel in placement.channels)
    yield "pp", "send", leaving * step.layout.microbatches, step.message


# ---- gradients and weights ------------------------------------------------------------------------------------------


def _replicated(step: _Step, layer: int | None = None) -> Iterator[_Sent]:
    """Buckets, each stage's its own. Shares are padded to the longest, so a reduce-scatter or all-gather is handed N
    times that. Summands of other tp ranks and of the other end's embedding are added up once a step, in the share that
    is left. `layer`: only of the buckets that have parameters of that layer."""
    layout = step.layout
    for params in step.held():
        for bucket in buckets(params, step.minimum, step.split, step.shared, layout.zero > 0 and step.rounds):
            if layer is not None and layer not in bucket.units:
                continue
            axis, parts = bucket.fsdp_axis, layout.size(bucket.fsdp_axis)
            stage = layout.zero if parts > 1 else 0
            if stage == 0:
                yield axis, "all-reduce", 1, bucket.size() * step.accum
            else:
                reductions = layout.microbatches if stage == 2 else 1
                yield axis, "reduce-scatter", reductions, bucket.padded(parts) * step.accum
                yield (
                    axis,
                    "all-gather",
                    1,
                    bucket.padded(parts) * (step.accum if bucket.full_precision else step.compute),
                )
            left = bucket.padded(parts) // parts if stage else bucket.size()
            yield "tp", "all-reduce", int(bucket.partial), left * step.accum
            yield "embedding", "all-reduce", int(bucket.tied), left * step.accum


def _fully_sharded(step: _Step) -> Iterator[_Sent]:
    """FSDP2: a unit is a block, its experts, or what stands around the blocks of a stage; it pads like the buckets.

    A unit is gathered for forward and again for backward, and reduce-scattered, in every microbatch; recompute finds
    its weights gathered. Copies (replicate) add up their shares once a step, and so do the two ends, theirs of a tied
    embedding. A gradient that is a summand over tp is added up before it is reduce-scattered, parameter by parameter,
    in every microbatch. Gradients of linears that are computed apart go by buckets, as in stage 2; those of parameters
    that are never rounded, where others are, once a step, as in stage 0.
    """
    layout, m = step.layout, step.layout.microbatches
    for params in step.held():
        gathered: Counter[tuple[str, int | None]] = Counter()  # by axis and layer, elements of a share
        reduced: Counter[tuple[str, int | None]] = Counter()
        for param in params:
            if step.rounds and param.parameter.full_precision:
                continue
            parts, unit = layout.size(param.fsdp_axis), (param.fsdp_axis, param.parameter.layer)
            gathered[unit] += param.share_size(parts)
            if step.split and param.parameter.deferred:
                continue
            reduced[unit] += param.share_size(parts)
            yield "tp", "all-reduce", m * param.tp.partial, param.size * step.compute
            if step.shared and param.parameter.tied:
                share = math.prod(map(len, param.share(parts, step.coords.fsdp)))
                yield "embedding", "all-reduce", 1, share * step.accum
        for (axis, _), share in gathered.items():
            yield axis, "all-gather", 2 * m, layout.size(axis) * share * step.compute
        for (axis, _), share in reduced.items():
            yield axis, "reduce-scatter", m, layout.size(axis) * share * step.accum
            yield "replicate", "all-reduce", 1, share * step.accum
        for bucket in buckets(params, step.minimum, step.split, low_precision=step.rounds):
            if bucket.deferred or bucket.full_precision:
                axis, parts = bucket.fsdp_axis, layout.size(bucket.fsdp_axis)
                share = bucket.size() if bucket.full_precision else bucket.padded(parts) // parts
                if bucket.full_precision:
                    yield axis, "all-reduce", 1, share * step.accum
                else:
                    yield axis, "reduce-scatter", m, parts * share * step.accum
                yield "tp", "all-reduce", int(bucket.partial), share * step.accum
                yield "replicate", "all-reduce", 1, share * step.accum


# ---- one layer, in order --------------------------------------------------------------------------------------------


def in_order(
    spec: ModelSpec, layout: Layout, seq: int, batch: int, dtype: str, layer: int, minimum: int = MINIMUM
) -> list[Collective]:
    """What is sent for a layer by the first rank that has it: for one microbatch, and once a step for all."""
    stage = next(stage for stage in stages_of(spec, layout, seq) if layer in stage.layers)
    coords = RankCoords(pp=layout.placement.owner[stage.index])
    step = _Step.of(spec, layout, seq, batch, dtype, coords=coords, minimum=minimum)
    block = step.block()
    if spec.experts is not None and not spec.dense(layer):
        block = replace(block, moe=True, rows=even_rows(spec, layout, step.tokens, [layer], 0)[0])
    params = _LayerParams.of(step, stage, layer)
    to_next = Collective("forward", "the stage's output, to the next", "pp", "send", 1, step.message)
    to_previous = Collective("backward", "its gradient, to the stage before", "pp", "send", 1, step.message)
    sent = chain(
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
    return [part for part in sent if part.calls and part.payload and layout.size(part.axis) > 1]


class _LayerParams(NamedTuple):
    """What is sent of a layer's weights and of their gradients."""

    layout: Layout
    sharded: bool  # by ZeRO 3
    sent: list[_Sent]

    @classmethod
    def of(cls, step: _Step, stage: Stage, layer: int) -> Self:
        alone = replace(step, stages=(Stage(stage.index, range(layer, layer + 1), first=False, last=False),))
        sharded = step.layout.fully_shards(step.spec)
        return cls(step.layout, sharded, list(_fully_sharded(alone) if sharded else _replicated(step, layer)))

    def gathered(self, when: When) -> Iterator[Collective]:
        """ZeRO 3 gathers weights for either pass."""
        if self.sharded:
            for axis, kind, _, payload in self.sent:
                if kind == "all-gather":
                    yield Collective(when, f"weights of {_owner(axis)}", axis, kind, 1, payload)

    def gradients(self) -> Iterator[Collective]:
        """What ZeRO 3 and 2 sum in every microbatch, and ZeRO 3 before that over tp."""
        return self._summed("backward", (sent for sent in self.sent if self._each_microbatch(sent)))

    def step_end(self) -> Iterator[Collective]:
        """Sums over what is left, and the new weights. A sum starts while the last backward passes run."""
        late = [sent for sent in self.sent if not self._each_microbatch(sent)]
        yield from self._summed("once a step", (sent for sent in late if sent[1] != "all-gather"))
        if not self.sharded:
            for axis, kind, calls, payload in late:
                if kind == "all-gather":
                    yield Collective("once a step", f"new weights of {_owner(axis)}", axis, kind, calls, payload)

    def _each_microbatch(self, sent: _Sent) -> bool:
        axis, kind, calls, _ = sent
        if kind == "reduce-scatter":
            return self.sharded or self.layout.zero == 2
        return self.sharded and axis == "tp" and calls == self.layout.microbatches

    def _summed(self, when: When, sent: Iterable[_Sent]) -> Iterator[Collective]:
        """Parameter by parameter over tp is one line."""
        for (axis, kind), group in groupby((row for row in sent if row[2]), key=lambda row: row[:2]):
            payloads = [payload for _, _, _, payload in group]
            for payload in sorted(set(payloads)):
                calls = payloads.count(payload)
                yield Collective(when, f"gradients of {_owner(axis)}", axis, kind, calls, payload)


def _owner(axis: str) -> str:
    if axis == "tp":
        return "what tp ranks share"
    return "its experts" if axis == "efsdp" else "the layer"


def shown_axis(layout: Layout, axis: str, kind: Kind) -> str:
    """What a reader looks for. Bytes are counted by the first axis that has the same ranks, so experts' messages go by
    dp, cp, tp or the world where ep is as wide; where others of their kind are counted with them, both are named."""
    if layout.ep == 1 or axis == "ep" or axis != layout.same_axis("ep"):
        return axis
    kinds = ("all-to-all",) if layout.dispatch == "alltoall" else ("all-gather", "reduce-scatter")
    if kind not in kinds:
        return axis
    trades = axis == "cp" and layout.cp_kind == "ulysses"
    return "ep" if kind == "all-to-all" and not trades else f"{axis}, ep"
