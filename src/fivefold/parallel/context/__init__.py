"""Context parallelism: the cp ranks share every sequence, in one of three ways.

ring        keys and values travel around the ranks   zigzag shares
allgather   every rank gathers all keys and values    zigzag shares
ulysses     ranks trade tokens for heads              contiguous shares
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.data.batch import Batch
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import context_share
from fivefold.model.ops import LocalAttention
from fivefold.model.positions import TokenPositions
from fivefold.model.spans import check_runs
from fivefold.parallel.context import allgather, ring, ulysses
from fivefold.parallel.context.tiles import gathered_tiles, own_tile, ring_tile
from fivefold.parallel.context.work import PartsMask, Places, Work, Works
from fivefold.parallel.mesh import Mesh


@dataclass(frozen=True)
class Share:
    """The tokens of a batch that one cp rank works on."""

    tokens: NDArray[np.int64]  # [B, S/c], like the next four
    targets: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    documents: NDArray[np.int32]
    positions: NDArray[np.int64]
    row_documents: NDArray[np.int32]  # [B, S] of whole rows: every cp rank reads them, so none has to ask

    def with_documents(self, positions: TokenPositions) -> TokenPositions:
        """The positions of these tokens, told of their documents."""
        documents = torch.from_numpy(self.documents).to(positions.position_ids.device, non_blocking=True)
        return replace(positions, documents=documents, row_documents=torch.from_numpy(self.row_documents))


def share_of(batch: Batch, layout: Layout, rank: int) -> Share:
    rows, seq = batch.tokens.shape
    pieces = layout.cp * (2 if layout.cp > 1 and layout.cp_kind != "ulysses" else 1)
    if seq % pieces:
        raise ValueError(f"a sequence of {seq} tokens does not divide into the {pieces} equal pieces of {layout}")
    places = _places(seq, layout, rank)
    return Share(
        tokens=batch.tokens[:, places],
        targets=batch.targets[:, places],
        loss_mask=batch.loss_mask[:, places],
        documents=batch.documents[:, places],
        positions=np.tile(places, (rows, 1)),
        row_documents=batch.documents,
    )


class Context:
    def __init__(self, mesh: Mesh):
        self.axis, self.layout = mesh.cp, mesh.layout
        self.kind = mesh.layout.cp_kind if mesh.cp.size > 1 else "local"

    def share(self, batch: Batch) -> Share:
        """This rank's part of every row of a batch."""
        return share_of(batch, self.layout, self.axis.rank)

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Any:
        """What `attend` needs to know of which tokens see which, for all layers with such a window. Nothing is sent."""
        if self.kind == "local":
            return LocalAttention().attention_mask(positions, window, sinks, dtype)
        if positions.documents is not None and positions.row_documents is None:
            raise ValueError(
                f"with cp={self.axis.size} positions with documents need row_documents, those of whole rows"
            )
        if self.kind == "ulysses":
            return LocalAttention().attention_mask(_whole(positions), window, sinks, dtype)
        return PartsMask(self._works(positions, window))

    def with_earlier(self, *tensors: Tensor, window: int = 0) -> tuple[Tensor, ...]:
        return tensors

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """q [B, H, S/c, D], k and v [B, K, S/c, D], of this rank's tokens -> [B, H, S/c, D]."""
        match self.kind:
            case "ring":
                return ring.Ring.apply(q, k, v, sinks, mask.works, self.axis)
            case "allgather":
                return allgather.AllGather.apply(q, k, v, sinks, mask.works, self.axis)
            case "ulysses":
                return ulysses.attend(q, k, v, mask, self.axis, sinks)
            case _:
                return LocalAttention().attend(q, k, v, mask, sinks)

    def _works(self, positions: TokenPositions, window: int) -> Works:
        """Ring: one for each step. All-gather: the own tile, then those that look at all keys."""
        rank, ranks, share = self.axis.rank, self.axis.size, positions.position_ids.shape[1]
        if self.kind == "ring":
            sources = [(rank - step) % ranks for step in range(ranks)]
            tiles = [ring_tile(rank, source, share) for source in sources]
        else:
            sources = [rank]
            tiles = [own_tile(share), *gathered_tiles(rank, ranks, share)]
        rows, device = positions.host_documents(), positions.position_ids.device
        if rows is None and not window:
            return [Work(tile) for tile in tiles]
        if rows is not None:
            check_runs(rows)
        everything = Places(np.arange(positions.length), rows)
        held = [everything.at(_places(positions.length, self.layout, source)) for source in sources]
        keys = zip(tiles, [*held, *[everything] * (len(tiles) - len(held))], strict=True)
        if window:
            return [Work.within(tile, held[0], of, window, device) for tile, of in keys]
        return [Work.of(tile, held[0], of, device) for tile, of in keys]


def _places(seq: int, layout: Layout, rank: int) -> NDArray[np.int64]:
    """The positions that a cp rank holds."""
    return np.concatenate([np.arange(piece.start, piece.stop) for piece in context_share(seq, layout, rank)])


def _whole(positions: TokenPositions) -> TokenPositions:
    """The positions of whole rows, of which a rank holds a share."""
    device, batch = positions.position_ids.device, positions.position_ids.shape[0]
    ids = torch.arange(positions.length, device=device).expand(batch, -1)
    documents = None if positions.row_documents is None else positions.row_documents.to(device, non_blocking=True)
    return TokenPositions(ids, positions.samples, positions.length, documents, positions.row_documents)
