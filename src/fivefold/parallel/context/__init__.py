"""Context parallelism: the cp ranks share every sequence, in one of three ways.

ring        keys and values go round the ranks        zigzag shares
allgather   every rank gathers all keys and values    zigzag shares
ulysses     ranks trade tokens for heads              contiguous shares
"""

from typing import Any

import torch
from torch import Tensor

from fivefold.data.batch import Batch
from fivefold.layout.sharding import context_share
from fivefold.model.ops import LocalAttention
from fivefold.model.positions import TokenPositions
from fivefold.model.spans import check_runs
from fivefold.parallel.context import allgather, ring, ulysses
from fivefold.parallel.context.share import Share, share_of
from fivefold.parallel.context.tiles import gathered_tiles, own_tile, ring_tile
from fivefold.parallel.context.work import Work
from fivefold.parallel.mesh import Mesh

__all__ = ["Context", "Share"]


class Context:
    def __init__(self, mesh: Mesh):
        self.axis, self.layout = mesh.cp, mesh.layout
        self.kind = mesh.layout.cp_kind if mesh.cp.size > 1 else "local"

    def share(self, batch: Batch) -> Share:
        """This rank's part of every row of a batch."""
        return share_of(batch, self.layout, self.axis.rank)

    def sight(self, place: TokenPositions) -> Any:
        """What `attend` has to know of who may look at whom; made once for all layers. Nothing is sent."""
        if self.kind == "local":
            return LocalAttention().sight(place)
        if place.documents is not None and place.row_documents is None:
            raise ValueError(
                f"with cp={self.axis.size} a place with documents needs row_documents, those of whole rows"
            )
        if self.kind == "ulysses":
            return LocalAttention().sight(_whole(place))
        return self._works(place)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sight: Any) -> Tensor:
        """q [B, H, S/c, D], k and v [B, K, S/c, D], of this rank's tokens -> [B, H, S/c, D]."""
        match self.kind:
            case "ring":
                return ring.attend(q, k, v, sight, self.axis)
            case "allgather":
                return allgather.attend(q, k, v, sight, self.axis)
            case "ulysses":
                return ulysses.attend(q, k, v, sight, self.axis)
            case _:
                return LocalAttention().attend(q, k, v, sight)

    def _works(self, place: TokenPositions) -> list[Work | None]:
        """Ring: one for each step. All-gather: the own tile, then those that look at all keys."""
        rank, ranks, share = self.axis.rank, self.axis.size, place.positions.shape[1]
        if self.kind == "ring":
            sources = [(rank - step) % ranks for step in range(ranks)]
            tiles = [ring_tile(rank, source, share) for source in sources]
        else:
            sources = [rank]
            tiles = [own_tile(share), *gathered_tiles(rank, ranks, share)]
        if place.row_documents is None:
            return [Work(tile) for tile in tiles]
        rows = place.row_documents.numpy()
        check_runs(rows)
        held = [rows[:, self._places(place.length, source)] for source in sources]
        keys = [*held, *[rows] * (len(tiles) - len(held))]
        device = place.positions.device
        return [Work.of(tile, held[0], of, device) for tile, of in zip(tiles, keys, strict=True)]

    def _places(self, length: int, rank: int) -> list[int]:
        return [position for piece in context_share(length, self.layout, rank) for position in piece]


def _whole(place: TokenPositions) -> TokenPositions:
    """The place of whole rows, of which a rank holds a share."""
    device, batch = place.positions.device, place.positions.shape[0]
    positions = torch.arange(place.length, device=device).expand(batch, -1)
    documents = None if place.row_documents is None else place.row_documents.to(device, non_blocking=True)
    return TokenPositions(positions, place.samples, place.length, documents, place.row_documents)
