"""Share: the tokens of a batch that one cp rank works on."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fivefold.data.batch import Batch
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import context_share
from fivefold.model.positions import TokenPositions


@dataclass(frozen=True)
class Share:
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
    places = np.concatenate([np.arange(piece.start, piece.stop) for piece in context_share(seq, layout, rank)])
    return Share(
        tokens=batch.tokens[:, places],
        targets=batch.targets[:, places],
        loss_mask=batch.loss_mask[:, places],
        documents=batch.documents[:, places],
        positions=np.tile(places, (rows, 1)),
        row_documents=batch.documents,
    )
