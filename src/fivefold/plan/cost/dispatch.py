"""What experts send: tokens to the ranks that have them and back, given where tokens go.

    rows = rows_of(spec, layout, rank, seq, batch, routing)     # a (sent, received) for each layer and microbatch
    dispatched(spec, layout, "bfloat16", rows, ...)             # its collectives

All-to-all: first the counts of X int64; then a row of E elements for each slot, of which a token has K, to the rank of
its expert, and what came of it back. All-gather: every rank of ep gets all tokens, their weights and choices, and sums
go back. Backward sends the same the other way around, full recompute sends forward's again, selective recompute none.
Where tp does not divide the sequence (no sp) each of its ranks routes a slice of the tokens, and the slices are
gathered afterwards, each as long as the first.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.collective_cost import Kind
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import chunk, context_share
from fivefold.layout.stages import stages_of
from fivefold.plan.cost.memory import BYTES, wide_bytes
from fivefold.spec.experts import Experts
from fivefold.spec.model import ModelSpec

Routing = Mapping[int, NDArray[np.int64]]  # by layer, [B, S, K]: the experts of each token of a global batch
Rows = list[tuple[int, int]]  # that a rank sends to experts and receives, for each layer and microbatch
_COUNT = 8  # bytes of a number of tokens, or of an expert's number


class Routed:
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
