"""What one rank sends in one training step, in closed form. `fivefold verify` holds it against what runs.

    expected(spec, layout, seq=4096, batch=512, dtype="bfloat16")     # rows: axis, kind, calls, payload, wire
    expected(..., seat=Seat.of(layout, rank=5))                       # of another rank than the first

Letters: B sequences of a microbatch on one dp rank, S tokens of a sequence on one cp rank, m microbatches, L layers of
one pp rank, E hidden, H and K query and kv heads of one tp rank, D head dim, t tp, c cp, N ranks of the zero axis, M
the bytes of the weights of one tp and pp rank. `narrow` is the compute dtype, in which activations and weights travel;
`wide`, float32 or float64, is that of gradients and of whatever is summed on the way.

Experts: X of them in a layer, of which a token visits K; `dispatch` has what they send, given where tokens go.

Textbook cases: dp, one all-reduce of M, 2M(N-1)/N on the wire; ZeRO 3 with one microbatch, 3M(N-1)/N; tp, four
all-reduces of BSE a layer; pp, BSE forward and BSE back per microbatch and boundary.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from fivefold.layout.buckets import MINIMUM, Held, buckets, held
from fivefold.layout.collective_cost import Kind, Traffic, total, wire
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import kv_head, slices
from fivefold.layout.stages import Stage, schedule_of, stages_of
from fivefold.plan.cost.dispatch import Rows, dispatched, even_rows
from fivefold.plan.cost.memory import BYTES, wide_bytes
from fivefold.spec.model import ModelSpec


class Seat(NamedTuple):
    """Where a rank stands, as far as it matters to what it sends."""

    tp: int = 0  # ranks along tp differ where the vocabulary does not divide
    pp: int = 0  # they have other stages
    zero: int = 0  # where the rows of a tied embedding do not divide
    ep: int = 0  # they have other experts
    ezero: int = 0

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Self:
        """Of a global rank."""
        return cls(*(layout.position(axis, rank) for axis in cls._fields))


FIRST = Seat()


@dataclass(frozen=True)
class _Step:
    """The numbers that the formulas below are made of."""

    spec: ModelSpec
    layout: Layout
    seat: Seat
    stages: tuple[Stage, ...]  # of this rank
    split: bool  # the schedule computes gradients of linears apart from the rest
    tokens: int  # B S
    narrow: int  # bytes
    wide: int
    minimum: int  # elements of a bucket
    smoothing: bool

    @property
    def forwards(self) -> int:
        """How often a block runs forward for one backward. Selective recompute keeps what its collectives made."""
        return 2 if self.layout.recompute == "full" else 1

    @property
    def layers(self) -> int:
        return sum(len(stage.layers) for stage in self.stages)

    @property
    def networks(self) -> int:
        """Layers with a feed-forward network that every token visits."""
        spec = self.spec
        shared = spec.experts is not None and spec.experts.shared > 0
        return sum(spec.dense(layer) or shared for stage in self.stages for layer in stage.layers)

    @property
    def states(self) -> int:
        """Bytes of BSE, the residual stream of a microbatch."""
        return self.tokens * self.spec.hidden * self.narrow

    @property
    def latents(self) -> int:
        """What all heads read in latent attention: the latents of queries, of keys and values, the key of positions."""
        mla = self.spec.mla
        return 0 if mla is None else self.tokens * (mla.q_rank + mla.kv_rank + mla.rope_dim) * self.narrow

    @property
    def squares(self) -> int:
        """Bytes of a token's squares of q and of k, where their norms are over all heads."""
        return 2 * self.tokens * self.wide if self.spec.qk_norm and self.spec.qk_norm_over == "all" else 0

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded to compute with, but for those that never are."""
        return self.narrow < self.wide

    @property
    def shared(self) -> bool:
        """Whether two ranks hold the copies of tied parameters."""
        return self.layout.size("ends") > 1

    def held(self) -> Iterator[list[Held]]:
        """The parameters of each stage. An embedding that both ends on one rank share is the first's."""
        every, seen = held(self.spec, self.layout, self.seat.tp, self.seat.ep), set[str]()
        for stage in self.stages:
            names = [name for name in stage.names(self.spec) if name not in seen]
            seen.update(names)
            yield [every[name] for name in names]


_Sent = tuple[str, Kind, int, int]  # axis, kind, calls, bytes of one call


def _numbers(spec: ModelSpec) -> list[_Sent]:
    """The loss over the ranks that have other tokens and to those without any; the square of the gradient norm, and
    beside it whether a rank wants to stop, rank 0's loss, and the load of every expert. They are added up in float64.
    """
    loads = 0 if spec.experts is None else (spec.layers - spec.dense_layers) * spec.experts.count + 2
    return [("data", "all-reduce", 1, 8), ("pp", "all-reduce", 1, 8), ("world", "all-reduce", 1, 24 + 8 * loads)]


def expected(
    spec: ModelSpec,
    layout: Layout,
    seq: int,
    batch: int,
    dtype: str,
    *,
    seat: Seat = FIRST,
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
    step = _step_of(spec, layout, seq, batch, dtype, seat, minimum, smoothing, splits)
    stages, tokens = step.stages, step.tokens
    sent = [*_numbers(spec), *(_fully_sharded(step) if layout.fully_shards(spec) else _replicated(step))]
    for axis, kind, calls, payload in (*_tensor(step), *_context(step), *_pipeline(step)):
        sent.append((axis, kind, calls * layout.microbatches, payload))
    if spec.experts is not None:
        mine = [layer for stage in stages for layer in stage.layers if not spec.dense(layer)]
        rows = even_rows(spec, layout, tokens, mine, seat.tp) if rows is None else rows
        sent += dispatched(spec, layout, dtype, rows, tokens, batch // layout.size("batch"), balance_loss)
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


def _step_of(
    spec: ModelSpec,
    layout: Layout,
    seq: int,
    batch: int,
    dtype: str,
    seat: Seat,
    minimum: int,
    smoothing: bool,
    splits: bool | None,
) -> _Step:
    tokens = batch // layout.size("batch") // layout.microbatches * (seq // layout.cp)
    every = stages_of(spec, layout, seq)
    stages = tuple(every[number] for number in layout.placement.of_rank[seat.pp])
    # `auto` splits the backward passes where its stages call for it; of the others one knows.
    split = layout.splits_backward if splits is None else splits
    if splits is None and layout.record.weighs:
        split = schedule_of(spec, layout, seq).splits
    return _Step(spec, layout, seat, stages, split, tokens, BYTES[dtype], wide_bytes(dtype), minimum, smoothing)


class LayerBytes(NamedTuple):
    """What the collectives of one layer carry; `in_order.py` has the order in which a microbatch meets them."""

    states: int  # the residual stream of a microbatch on this rank
    latents: int
    squares: int
    context: list[_Sent]  # of a microbatch
    experts: list[_Sent]
    parameters: list[_Sent]  # of a step
    message: int  # to the next pipeline rank


def of_layer(
    spec: ModelSpec, layout: Layout, seq: int, batch: int, dtype: str, layer: int, minimum: int = MINIMUM
) -> LayerBytes:
    """Of the first rank that has the layer."""
    stage = next(one for one in stages_of(spec, layout, seq) if layer in one.layers)
    seat = Seat(pp=layout.placement.owner[stage.index])
    step = _step_of(spec, layout, seq, batch, dtype, seat, minimum, smoothing=False, splits=None)
    one = replace(step, stages=(Stage(stage.index, range(layer, layer + 1), first=False, last=False),))
    experts: list[_Sent] = []
    if spec.experts is not None and not spec.dense(layer):
        rows = even_rows(spec, layout, step.tokens, [layer], 0)[:1]
        experts = list(dispatched(spec, layout, dtype, rows, step.tokens, batch // layout.size("batch"), False))
    parameters = _fully_sharded(one) if layout.fully_shards(spec) else _replicated(step, layer)
    message = next(payload for _, _, _, payload in _pipeline(step))
    return LayerBytes(step.states, step.latents, step.squares, list(_context(one)), experts, list(parameters), message)


def _tensor(step: _Step) -> Iterator[_Sent]:
    """Megatron-LM's (arXiv 1909.08053, section 3; with sp 2205.05198, section 4.2). All of them carry BSE elements.

    A layer has two column groups (q, k, v; gate, up) and two row linears (o, down); one with experts has the second of
    each only if a shared one is among them. Forward sums the rows' outputs,
    backward the columns' input gradients; with sp a sum leaves each rank its part of the sequence, and what a group
    reads, forward or backward, is gathered first, the columns' saved input once more in backward.
    Latent attention gathers and sums latents instead of the stream (but for queries that have none), the former once.
    The embedding sums like a row linear; the head reads like a column group, forward and backward in one. Neither is
    recomputed. A backward pass in two halves sends the same: the saved input is gathered by the half that needs it, the
    weights'.
    """
    layers, forwards, last = step.layers, step.forwards, any(stage.last for stage in step.stages)
    ends = any(stage.first for stage in step.stages) + last
    mla, rows = step.spec.mla, layers + step.networks
    sums: Kind = "reduce-scatter" if step.layout.sp else "all-reduce"
    groups = rows - (layers if mla and mla.q_rank else 0)  # of columns that read the stream
    yield "tp", sums, rows * forwards + groups + ends, step.states
    if step.layout.sp:
        yield "tp", "all-gather", groups * (forwards + 1) + rows + ends, step.states
    if mla:
        yield "tp", sums, layers, step.latents
        if step.layout.sp:
            yield "tp", "all-gather", layers * forwards, step.latents
    if step.squares:  # and their gradients
        yield "tp", "all-reduce", layers * (forwards + 1), step.squares
    # The cross-entropy, a slice of the tokens at a time: the largest sum of exponentials of each; then all of them and
    # its target's logit, and for label smoothing the sum of its logits.
    for part in slices(step.tokens, -(-step.spec.vocab // step.layout.tp)):
        yield "tp", "all-reduce", int(last), len(part) * step.wide
        yield "tp", "all-reduce", int(last), (3 if step.smoothing else 2) * len(part) * step.wide


def _pipeline(step: _Step) -> Iterator[_Sent]:
    """The residual stream over every boundary to another rank, and its gradient back; under sp this rank's tokens."""
    layout = step.layout
    placed = layout.placement
    leaving = sum(placed.owner[channel.source] == step.seat.pp for channel in placed.channels)
    yield "pp", "send", leaving, step.states // (layout.tp if layout.sp else 1)


def _context(step: _Step) -> Iterator[_Sent]:
    """Keys and values round the ring, gathered, or traded for heads (parallel/context says how each works)."""
    spec, layout, layers, c = step.spec, step.layout, step.layers, step.layout.cp
    heads, kv_heads = spec.heads // layout.tp, len(kv_head(spec, layout, 0))
    head = step.tokens * spec.head_dim  # elements of one head of this rank's tokens
    pair = 2 * head * kv_heads  # of its keys and values
    if layout.cp_kind == "ring":
        # Round once in each forward and once in backward; their gradient follows, and travels one step further, home.
        yield "cp", "send", layers * (step.forwards + 1) * (c - 1), pair * step.narrow
        yield "cp", "send", layers * c, pair * step.wide
    elif layout.cp_kind == "allgather":
        yield "cp", "all-gather", layers * (step.forwards + 1), c * pair * step.narrow
        yield "cp", "reduce-scatter", layers, c * pair * step.wide
    else:
        # Queries, keys and values one way, outputs the other; kv heads are repeated until c divides them.
        traded = heads + 2 * math.lcm(kv_heads, c)
        yield "cp", "all-to-all", layers * (step.forwards + 1), head * traded * step.narrow
        yield "cp", "all-to-all", layers * (step.forwards + 1), head * heads * step.narrow


def _replicated(step: _Step, layer: int | None = None) -> Iterator[_Sent]:
    """Buckets, each stage's its own. Shares are padded to the longest, so a reduce-scatter or all-gather is handed N
    times that. Summands of other tp ranks and of the other end's embedding are added up once a step, in the share that
    is left. `layer`: only of the buckets that have parameters of that layer."""
    layout = step.layout
    for mine in step.held():
        for bucket in buckets(mine, step.minimum, step.split, step.shared, layout.zero > 0 and step.rounds):
            if layer is not None and layer not in bucket.units:
                continue
            axis, parts = bucket.zero_axis, layout.size(bucket.zero_axis)
            stage = layout.zero if parts > 1 else 0
            if stage == 0:
                yield axis, "all-reduce", 1, bucket.size() * step.wide
            else:
                reductions = layout.microbatches if stage == 2 else 1
                yield axis, "reduce-scatter", reductions, bucket.padded(parts) * step.wide
                yield axis, "all-gather", 1, bucket.padded(parts) * (step.wide if bucket.exact else step.narrow)
            left = bucket.padded(parts) // parts if stage else bucket.size()
            yield "tp", "all-reduce", int(bucket.partial), left * step.wide
            yield "ends", "all-reduce", int(bucket.shared), left * step.wide


def _fully_sharded(step: _Step) -> Iterator[_Sent]:
    """FSDP2: a unit is a block, its experts, or what stands around the blocks of a stage; it pads like the buckets.

    A unit is gathered for forward and again for backward, and reduce-scattered, in every microbatch; recompute finds
    its weights gathered. Copies (replicate) add up their shares once a step, and so do the two ends, theirs of a tied
    embedding. A gradient that is a summand over tp is added up before it is reduce-scattered, parameter by parameter,
    in every microbatch. Gradients of linears that are computed apart go by buckets, as in stage 2; those of parameters
    that are never rounded, where others are, once a step, as in stage 0.
    """
    layout, m = step.layout, step.layout.microbatches
    for mine in step.held():
        gathered: Counter[tuple[str, int | None]] = Counter()  # by axis and layer, elements of a share
        reduced: Counter[tuple[str, int | None]] = Counter()
        for one in mine:
            if step.rounds and one.parameter.exact:
                continue
            parts, unit = layout.size(one.zero_axis), (one.zero_axis, one.parameter.layer)
            gathered[unit] += one.share_size(parts)
            if step.split and one.parameter.deferred:
                continue
            reduced[unit] += one.share_size(parts)
            yield "tp", "all-reduce", m * one.tp.partial, one.size * step.narrow
            if step.shared and one.parameter.tied:
                yield "ends", "all-reduce", 1, math.prod(map(len, one.share(parts, step.seat.zero))) * step.wide
        for (axis, _), share in gathered.items():
            yield axis, "all-gather", 2 * m, layout.size(axis) * share * step.narrow
        for (axis, _), share in reduced.items():
            yield axis, "reduce-scatter", m, layout.size(axis) * share * step.wide
            yield "replicate", "all-reduce", 1, share * step.wide
        for bucket in buckets(mine, step.minimum, step.split, narrow=step.rounds):
            if bucket.late or bucket.exact:
                axis, parts = bucket.zero_axis, layout.size(bucket.zero_axis)
                share = bucket.size() if bucket.exact else bucket.padded(parts) // parts
                if bucket.exact:
                    yield axis, "all-reduce", 1, share * step.wide
                else:
                    yield axis, "reduce-scatter", m, parts * share * step.wide
                yield "tp", "all-reduce", int(bucket.partial), share * step.wide
                yield "replicate", "all-reduce", 1, share * step.wide
