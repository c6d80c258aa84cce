"""The collectives of one layer in the order in which a microbatch meets them: forward, backward, and once a step.

for sent in in_order(spec, layout, seq=8192, batch=2048, dtype="bfloat16", layer=17):
    sent.when, sent.what, sent.axis, sent.kind, sent.calls, sent.payload

`LayerBytes` has what each of them carries; here is which follows which, as `parallel/` sends them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fivefold.cost.links import Kind, Traffic, total, wire
from fivefold.cost.memory import BYTES, wide_bytes
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import MINIMUM, LocalParam, buckets, chunk, context_share, held, kv_head, slices
from fivefold.layout.stages import Stage, schedule_of, stages_of
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec

# ---- dispatch -------------------------------------------------------------------------------------------------------
# What experts send: tokens to the ranks that have them and back, given where tokens go.
#
#     rows = rows_of(spec, layout, rank, seq, batch, routing)     # a (sent, received) for each layer and microbatch
#     dispatched(spec, layout, "bfloat16", rows, ...)             # its collectives
#
# All-to-all: first the counts of X int64; then a row of E elements for each slot, of which a token has K, to the rank
# of its expert, and what came of it back. All-gather: every rank of ep gets all tokens, their weights and choices, and
# sums go back. Backward sends the same the other way around, full recompute sends forward's again, selective recompute
# none. Where tp does not divide the sequence (no sp) each of its ranks routes a slice of the tokens, and the slices
# are gathered afterwards, each as long as the first.


Routing = Mapping[int, NDArray[np.int64]]  # by layer, [B, S, K]: the experts of each token of a global batch
Rows = list[tuple[int, int]]  # that a rank sends to experts and receives, for each layer and microbatch
_COUNT = 8  # bytes of a number of tokens, or of an expert's number


class RoutedTokens:
    """A rank's part of a microbatch with `tokens` on its cp rank, on average; the fullest rank receives `imbalance`
    times that. For classes that have these four."""

    spec: ModelSpec
    layout: Layout
    tokens: int
    imbalance: float

    @property
    def experts(self) -> Experts:
        assert self.spec.experts is not None
        return self.spec.experts

    @property
    def routed(self) -> int:
        """Tokens that the first tp rank routes."""
        return len(chunk(self.tokens, self.layout.tp, 0))

    @property
    def slots(self) -> int:
        """Rows that a rank sends."""
        return self.routed * self.experts.top_k

    @property
    def rows(self) -> float:
        """Rows that the fullest rank receives and computes: no rank has more than all."""
        return self.slots * min(self.imbalance, self.layout.ep)


def tokens_of(layout: Layout, rank: int, seq: int, batch: int, microbatch: int) -> tuple[NDArray[np.int64], ...]:
    """The rows and positions of the tokens that a rank routes of one of its microbatches, in its order."""
    at = {axis: layout.position(axis, rank) for axis in ("batch", "cp", "tp")}
    mine = chunk(batch, layout.size("batch") * layout.microbatches, at["batch"] * layout.microbatches + microbatch)
    share = np.concatenate([np.array(piece) for piece in context_share(seq, layout, at["cp"])])
    if layout.sp:
        piece = chunk(len(share), layout.tp, at["tp"])
        share = share[piece.start : piece.stop]
    rows, positions = (grid.ravel() for grid in np.meshgrid(np.array(mine), share, indexing="ij"))
    if layout.sp:
        return rows, positions
    piece = chunk(len(rows), layout.tp, at["tp"])
    return rows[piece.start : piece.stop], positions[piece.start : piece.stop]


def rows_of(spec: ModelSpec, layout: Layout, rank: int, seq: int, batch: int, routing: Routing) -> Rows:
    """Of one rank in one step."""
    assert spec.experts is not None
    every, own = stages_of(spec, layout, seq), layout.position("ep", rank)
    numbers = layout.placement.of_rank[layout.position("pp", rank)]
    layers = [layer for number in numbers for layer in every[number].layers if not spec.dense(layer)]
    each, peers = spec.experts.count // layout.ep, layout.group("ep", rank) if layout.ep > 1 else [rank]
    found = []
    for microbatch in range(layout.microbatches):
        tokens = [tokens_of(layout, peer, seq, batch, microbatch) for peer in peers]
        for layer in layers:
            sent = routing[layer][tokens[own]].size
            found.append((sent, sum(int((routing[layer][at] // each == own).sum()) for at in tokens)))
    return found


def even_rows(
    spec: ModelSpec, layout: Layout, tokens: int, layers: Iterable[int], tp: int, imbalance: float = 1.0
) -> Rows:
    """The same for any rank at place `tp` of that axis, whose microbatches have so many tokens, if all experts get the
    same load; or if this rank's get `imbalance` times the mean."""
    assert spec.experts is not None
    slots = len(chunk(tokens, layout.tp, tp)) * spec.experts.top_k
    came = round(imbalance * slots) if layout.ep > 1 else slots
    return [(slots, came) for _ in range(layout.microbatches) for _ in layers]


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


def dispatched(
    spec: ModelSpec, layout: Layout, dtype: str, rows: Rows, tokens: int, samples: int, balance_loss: bool
) -> Iterator[tuple[str, Kind, int, int]]:
    """The collectives of experts: axis, kind, calls, bytes of one call. A microbatch has `tokens` on this cp rank; this
    dp rank has `samples` in a step."""
    experts, narrow, wide = spec.experts, BYTES[dtype], wide_bytes(dtype)
    assert experts is not None
    layers, forwards = len(rows), 2 if layout.recompute == "full" else 1  # of all microbatches
    # A recomputation ends with the last thing that backward asks for: the sum over slots, unless something follows. A
    # shared expert does where nothing travels; where tokens do, it computes meanwhile.
    whole = forwards if spec.dropout or (experts.shared and layout.ep == 1) else 1
    most = len(chunk(tokens, layout.tp, 0))  # of the rank that routes most
    width, ranks = spec.hidden * narrow, layout.ep
    if not layout.sp:
        yield "tp", "all-gather", layers * (whole + 1), layout.tp * most * width
    if balance_loss:  # how often the tokens of each row chose each expert
        each = samples // layout.microbatches * experts.count * _COUNT
        yield "sequence", "all-reduce", layers * forwards, each
    if layout.dispatch == "alltoall":
        yield "ep", "all-to-all", layers * forwards, experts.count * _COUNT
        for sent, received in rows:
            yield "ep", "all-to-all", 2 * forwards + 2, max(sent, received) * width
    else:
        slots, gathered = ranks * most * experts.top_k, ranks * most * spec.hidden
        yield "ep", "all-gather", layers * forwards, gathered * narrow
        yield "ep", "all-gather", layers * forwards, slots * wide
        yield "ep", "all-gather", layers * forwards, slots * _COUNT
        yield "ep", "reduce-scatter", layers * whole, gathered * wide
        yield "ep", "reduce-scatter", layers, gathered * wide
        yield "ep", "reduce-scatter", layers, slots * wide
        yield "ep", "all-gather", layers, gathered * wide


# ---- traffic --------------------------------------------------------------------------------------------------------
# What one rank sends in one training step, in closed form. `fivefold verify` holds it against what runs.
#
#     expected(spec, layout, seq=4096, batch=512, dtype="bfloat16")     # rows: axis, kind, calls, payload, wire
#     expected(..., seat=Seat.of(layout, rank=5))                       # of another rank than the first
#
# Letters: B sequences of a microbatch on one dp rank, S tokens of a sequence on one cp rank, m microbatches, L layers
# of one pp rank, E hidden, H and K query and kv heads of one tp rank, D head dim, t tp, c cp, N ranks of the zero
# axis, M the bytes of the weights of one tp and pp rank. `narrow` is the compute dtype, in which activations and
# weights travel; `wide`, float32 or float64, is that of gradients and of whatever is summed on the way.
#
# Experts: X of them in a layer, of which a token visits K; `dispatch` has what they send, given where tokens go.
#
# Textbook cases: dp, one all-reduce of M, 2M(N-1)/N on the wire; ZeRO 3 with one microbatch, 3M(N-1)/N; tp, four
# all-reduces of BSE a layer; pp, BSE forward and BSE back per microbatch and boundary.


class RankCoords(NamedTuple):
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


FIRST = RankCoords()


@dataclass(frozen=True)
class _Step:
    """The numbers that the formulas below are made of."""

    spec: ModelSpec
    layout: Layout
    seat: RankCoords
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

    def held(self) -> Iterator[list[LocalParam]]:
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
    seat: RankCoords = FIRST,
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
    seat: RankCoords,
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
    """What the collectives of one layer carry; `in_order` has the order in which a microbatch meets them."""

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
    seat = RankCoords(pp=layout.placement.owner[stage.index])
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
    """Keys and values round the ring, gathered, or traded for heads (parallel/context.py says how each works)."""
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


# ---- in order -------------------------------------------------------------------------------------------------------


When = Literal["forward", "backward", "once a step"]


class LayerMessage(NamedTuple):
    """`calls` collectives of `payload` bytes each, as `Traffic` counts them."""

    when: When
    what: str
    axis: str
    kind: Kind
    calls: int
    payload: int


def in_order(
    spec: ModelSpec, layout: Layout, seq: int, batch: int, dtype: str, layer: int, minimum: int = MINIMUM
) -> list[LayerMessage]:
    """What is sent for a layer by one rank that has it: for one microbatch, and once a step for all."""
    one = _Layer(spec, layout, layer, of_layer(spec, layout, seq, batch, dtype, layer, minimum))
    stage = next(stage for stage in stages_of(spec, layout, seq) if layer in stage.layers)
    sent = [*one.weights("forward"), *one.forward("forward")]
    if layer == stage.layers[-1] and not stage.last:
        sent.append(LayerMessage("forward", "the stage's output, to the next", "pp", "send", 1, one.bytes.message))
    sent += one.weights("backward")
    if layout.recompute == "full":
        sent += [again._replace(what=f"again: {again.what}") for again in one.forward("backward", again=True)]
    sent += [*one.backward(), *one.gradients()]
    if layer == stage.layers[0] and not stage.first:
        sent.append(LayerMessage("backward", "its gradient, to the stage before", "pp", "send", 1, one.bytes.message))
    sent += one.step_end()
    return [part for part in sent if part.calls and part.payload and layout.size(part.axis) > 1]


class _Layer(NamedTuple):
    spec: ModelSpec
    layout: Layout
    layer: int
    bytes: LayerBytes

    @property
    def sums(self) -> Kind:
        return "reduce-scatter" if self.layout.sp else "all-reduce"

    @property
    def mixture(self) -> bool:
        return self.spec.experts is not None and not self.spec.dense(self.layer)

    @property
    def reads_stream(self) -> bool:
        """Whether queries, keys and values come from the stream, and not all from latents."""
        return not (self.spec.mla and self.spec.mla.q_rank)

    def _tp(self, when: When, what: str, kind: Kind, payload: int) -> LayerMessage:
        return LayerMessage(when, what, "tp", kind, 1, payload)

    # ---- passes ----------------------------------------------------------------------------------------------------

    def forward(self, when: When, again: bool = False) -> Iterator[LayerMessage]:
        """`again`: as recomputation runs it."""
        carried, sp = self.bytes, self.layout.sp
        if sp and self.reads_stream:
            yield self._tp(when, "tokens, for q, k and v", "all-gather", carried.states)
        if sp:
            yield self._tp(when, "latents, for all heads", "all-gather", carried.latents)
        yield self._tp(when, "squares of q and k", "all-reduce", carried.squares)
        yield from self._attention(when)
        yield self._tp(when, "the sum of what heads said", self.sums, carried.states)
        if self.mixture:
            yield from self._experts(when, again)
        else:
            yield from self._network(when, "the network")

    def _network(self, when: When, name: str) -> Iterator[LayerMessage]:
        if self.layout.sp:
            yield self._tp(when, f"tokens, for {name}", "all-gather", self.bytes.states)
        yield self._tp(when, f"the sum of what {name} said", self.sums, self.bytes.states)

    def backward(self) -> Iterator[LayerMessage]:
        carried, sp = self.bytes, self.layout.sp
        if self.mixture:
            yield from self._experts_back()
        else:
            yield from self._network_back("the network")
        if sp:
            yield self._tp("backward", "gradients, for the heads", "all-gather", carried.states)
        yield from self._attention_back()
        yield self._tp("backward", "squares of q and k", "all-reduce", carried.squares)
        if self.reads_stream:
            if sp:
                yield self._tp("backward", "the saved tokens of q, k and v", "all-gather", carried.states)
            yield self._tp("backward", "the sum of gradients of q, k and v", self.sums, carried.states)
        yield self._tp("backward", "the sum of gradients of latents", self.sums, carried.latents)

    def _network_back(self, name: str) -> Iterator[LayerMessage]:
        if self.layout.sp:
            yield self._tp("backward", f"gradients, for {name}", "all-gather", self.bytes.states)
            yield self._tp("backward", f"the saved tokens of {name}", "all-gather", self.bytes.states)
        yield self._tp("backward", f"the sum of gradients of {name}", self.sums, self.bytes.states)

    # ---- context ---------------------------------------------------------------------------------------------------

    def _attention(self, when: When) -> Iterator[LayerMessage]:
        if self.layout.cp == 1:
            return
        (axis, kind, _, payload), (_, _, _, other) = self.bytes.context
        match self.layout.cp_kind:
            case "ring":
                yield LayerMessage(when, "keys and values, round the ring", axis, kind, self.layout.cp - 1, payload)
            case "allgather":
                yield LayerMessage(when, "everybody's keys and values", axis, kind, 1, payload)
            case _:
                yield LayerMessage(when, "queries, keys and values for heads", axis, kind, 1, payload)
                yield LayerMessage(when, "heads for tokens", axis, kind, 1, other)

    def _attention_back(self) -> Iterator[LayerMessage]:
        if self.layout.cp == 1:
            return
        (axis, kind, _, payload), (_, summed, _, other) = self.bytes.context
        match self.layout.cp_kind:
            case "ring":
                yield LayerMessage(
                    "backward", "keys and values, round the ring", axis, kind, self.layout.cp - 1, payload
                )
                yield LayerMessage(
                    "backward", "their gradients, round it and home", axis, summed, self.layout.cp, other
                )
            case "allgather":
                yield LayerMessage("backward", "everybody's keys and values", axis, kind, 1, payload)
                yield LayerMessage("backward", "the sum of their gradients", axis, summed, 1, other)
            case _:
                yield LayerMessage("backward", "gradients for heads", axis, kind, 1, other)
                yield LayerMessage("backward", "gradients for tokens", axis, kind, 1, payload)

    # ---- experts ---------------------------------------------------------------------------------------------------

    @property
    def _shared(self) -> bool:
        return self.spec.experts is not None and self.spec.experts.shared > 0

    def _said(self) -> list[int]:
        """Bytes of each of the messages of experts, in the order of `dispatched`."""
        return [payload for axis, _, _, payload in self.bytes.experts if axis == "ep"]

    def _own_tokens(self) -> tuple[int, int]:
        """Without sp every tp rank routes its part of the tokens: calls and bytes of bringing them together."""
        found = [sent for sent in self.bytes.experts if sent[0] == "tp"]
        return (found[0][2], found[0][3]) if found else (0, 0)

    def _experts(self, when: When, again: bool) -> Iterator[LayerMessage]:
        said, (gathers, tokens) = self._said(), self._own_tokens()
        if self.layout.dispatch == "alltoall":
            counts, rows = said
            yield LayerMessage(when, "how many tokens go to each expert", "ep", "all-to-all", 1, counts)
            yield LayerMessage(when, "tokens, to their experts", "ep", "all-to-all", 1, rows)
        else:
            for what, payload in zip(("everybody's tokens", "their weights", "their choices"), said, strict=False):
                yield LayerMessage(when, what, "ep", "all-gather", 1, payload)
        if self._shared:
            yield from self._network(when, "the shared expert")
        if self.layout.dispatch == "alltoall":
            yield LayerMessage(when, "what experts said, home", "ep", "all-to-all", 1, rows)
        elif not again or self._whole:
            yield LayerMessage(when, "the sum of what experts said", "ep", "reduce-scatter", 1, said[3])
        if not again or gathers > 2:
            yield LayerMessage(when, "all tokens of the sequence", "tp", "all-gather", 1, tokens)

    @property
    def _whole(self) -> bool:
        """Whether a recomputation runs to the sum over slots."""
        return next(calls for _, kind, calls, _ in self.bytes.experts if kind == "reduce-scatter") > 1

    def _experts_back(self) -> Iterator[LayerMessage]:
        said, (_, tokens) = self._said(), self._own_tokens()
        if self.layout.dispatch == "alltoall":
            yield LayerMessage("backward", "gradients, to the experts", "ep", "all-to-all", 1, said[1])
            yield LayerMessage("backward", "gradients of tokens, home", "ep", "all-to-all", 1, said[1])
        else:
            yield LayerMessage("backward", "everybody's gradients", "ep", "all-gather", 1, said[6])
            yield LayerMessage("backward", "the sum of gradients of tokens", "ep", "reduce-scatter", 1, said[4])
            yield LayerMessage("backward", "the sum of gradients of weights", "ep", "reduce-scatter", 1, said[5])
        if self._shared:
            yield from self._network_back("the shared expert")
        yield LayerMessage("backward", "gradients of all tokens", "tp", "all-gather", 1, tokens)

    # ---- parameters ------------------------------------------------------------------------------------------------

    @property
    def _sharded(self) -> bool:
        return self.layout.fully_shards(self.spec)

    def weights(self, when: When) -> Iterator[LayerMessage]:
        """ZeRO 3 gathers them for either pass."""
        if self._sharded:
            for axis, kind, _, payload in self.bytes.parameters:
                if kind == "all-gather":
                    yield LayerMessage(when, f"weights of {self._of(axis)}", axis, kind, 1, payload)

    def gradients(self) -> Iterator[LayerMessage]:
        """What ZeRO 3 and 2 sum in every microbatch, and ZeRO 3 before that over tp."""
        yield from self._summed("backward", (sent for sent in self.bytes.parameters if self._often(sent)))

    def step_end(self) -> Iterator[LayerMessage]:
        """Sums over what is left, and the new weights. A sum starts while the last backward passes run."""
        late = [sent for sent in self.bytes.parameters if not self._often(sent)]
        yield from self._summed("once a step", (sent for sent in late if sent[1] != "all-gather"))
        if not self._sharded:
            for axis, kind, calls, payload in late:
                if kind == "all-gather":
                    yield LayerMessage("once a step", f"new weights of {self._of(axis)}", axis, kind, calls, payload)

    def _often(self, sent: tuple[str, Kind, int, int]) -> bool:
        """Whether it is sent in every microbatch."""
        axis, kind, calls, _ = sent
        if kind == "reduce-scatter":
            return self._sharded or self.layout.zero == 2
        return self._sharded and axis == "tp" and calls == self.layout.microbatches

    def _summed(self, when: When, sent: Iterator[tuple[str, Kind, int, int]]) -> Iterator[LayerMessage]:
        """Parameter by parameter over tp is one line."""
        for (axis, kind), group in groupby((one for one in sent if one[2]), key=lambda one: one[:2]):
            payloads = [payload for _, _, _, payload in group]
            for payload in sorted(set(payloads)):
                yield LayerMessage(when, f"gradients of {self._of(axis)}", axis, kind, payloads.count(payload), payload)

    def _of(self, axis: str) -> str:
        if axis == "tp":
            return "what tp ranks share"
        return "its experts" if axis == "ezero" else "the layer"
