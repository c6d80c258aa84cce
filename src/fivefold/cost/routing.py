"""How many tokens a rank sends to experts and gets for its own, given where tokens go or if all experts get as many.

rows_of(spec, layout, rank, seq, batch, routing)        # sent, received and kept, for each layer and microbatch
even_rows(spec, layout, tokens, layers, coords)         # the same without knowing the routing
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.context_split import context_share
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.layout.sharding import chunk
from fivefold.layout.stages import stages_of
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec

Routing = Mapping[int, NDArray[np.int64]]  # by layer, [B, S, K]: the experts of each token of a global batch


class RoutedRows(NamedTuple):
    """Tokens, K times each, of a layer and microbatch."""

    sent: int = 0  # by a rank, to experts
    received: int = 0  # for its own
    kept: int = 0  # of either: those that it sends to itself


Rows = list[RoutedRows]  # of a rank, for each layer and microbatch


class RoutedTokens:
    """A rank's part of a microbatch with `tokens` on its cp rank. For classes that have these three."""

    spec: ModelSpec
    layout: Layout
    tokens: int

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
        """(token, expert) pairs of these tokens: the rows that a rank sends."""
        return self.routed * self.experts.top_k


class ExpertLoad(RoutedTokens):
    """What such a rank receives, where the most loaded one receives `imbalance` times the mean."""

    imbalance: float

    @property
    def rows(self) -> float:
        """Rows that the most loaded rank receives and computes: no rank has more than all."""
        return self.slots * min(self.imbalance, self.layout.ep)


def tokens_of(layout: Layout, rank: int, seq: int, batch: int, microbatch: int) -> tuple[NDArray[np.int64], ...]:
    """The rows and positions of the tokens that a rank routes of one of its microbatches, in its order."""
    at = {axis: layout.position(axis, rank) for axis in ("batch", "cp", "tp")}
    sequences = chunk(batch, layout.size("batch") * layout.microbatches, at["batch"] * layout.microbatches + microbatch)
    share = np.concatenate([np.array(piece) for piece in context_share(seq, layout, at["cp"])])
    if layout.sp:
        piece = chunk(len(share), layout.tp, at["tp"])
        share = share[piece.start : piece.stop]
    rows, positions = (grid.ravel() for grid in np.meshgrid(np.array(sequences), share, indexing="ij"))
    if layout.sp:
        return rows, positions
    piece = chunk(len(rows), layout.tp, at["tp"])
    return rows[piece.start : piece.stop], positions[piece.start : piece.stop]


def rows_of(spec: ModelSpec, layout: Layout, rank: int, seq: int, batch: int, routing: Routing) -> Rows:
    """The rows of one rank in one step."""
    assert spec.experts is not None
    stages, ep_rank = stages_of(spec, layout, seq), layout.position("ep", rank)
    numbers = layout.placement.of_rank[layout.position("pp", rank)]
    layers = [layer for number in numbers for layer in stages[number].layers if spec.kinds(layer).routed]
    per_rank = spec.experts.count // layout.ep
    peers = layout.group("ep", rank) if layout.ep > 1 else [rank]
    rows = []
    for microbatch in range(layout.microbatches):
        tokens = [tokens_of(layout, peer, seq, batch, microbatch) for peer in peers]
        for layer in layers:
            came = [int((routing[layer][at] // per_rank == ep_rank).sum()) for at in tokens]
            rows.append(RoutedRows(routing[layer][tokens[ep_rank]].size, sum(came), came[ep_rank]))
    return rows


def even_rows(
    spec: ModelSpec, layout: Layout, tokens: int, layers: Iterable[int], at: RankCoords, imbalance: float = 1.0
) -> Rows:
    """The same for the rank at these coordinates, whose microbatches have so many tokens, if all experts get the same
    load, from each rank the same; or if this rank's get `imbalance` times the mean."""
    assert spec.experts is not None
    slots = len(chunk(tokens, layout.tp, at.tp)) * spec.experts.top_k
    received = round(imbalance * slots) if layout.ep > 1 else slots
    kept = received // layout.ep + (at.ep < received % layout.ep)
    return [RoutedRows(slots, received, kept) for _ in range(layout.microbatches) for _ in layers]
