"""A batch of samples, as arrays.

B samples, S tokens of sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.data.order import window_of, windows
from fivefold.data.rows import TokenRow, read_window


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of some samples.

    A target in the next document (predicted from an end-of-document token) keeps its loss: how documents begin is
    something to learn, and dropping it would make the number of loss tokens depend on where documents end. Only the
    masks that came with the text take loss away.
    """

    samples: NDArray[np.int64]  # B: the global sample indices
    tokens: NDArray[np.int64]  # B S
    targets: NDArray[np.int64]  # B S: the token after each
    loss_mask: NDArray[np.bool_]  # B S: True where the target carries loss
    documents: NDArray[np.int32]  # B S: the document of each input token, from 0 in every row

    @cached_property
    def loss_tokens(self) -> int:
        """How many targets carry loss: this batch's share of the global count that the loss is divided by."""
        return int(np.count_nonzero(self.loss_mask))

    def split(self, parts: int) -> "list[Batch]":
        """Equal shares in sample order: microbatches, or the shares of data-parallel ranks."""
        arrays = (self.samples, self.tokens, self.targets, self.loss_mask, self.documents)
        return [Batch(*share) for share in zip(*(np.split(array, parts) for array in arrays), strict=True)]

    def share(self, parts: int, number: int) -> "DpShare":
        return DpShare(self.split(parts)[number], self.samples, self.loss_tokens)

    def padded(self, parts: int) -> "Batch":
        """As many samples as divide into `parts` equal shares: the first sample again, without loss."""
        missing = -len(self.samples) % parts
        if not missing:
            return self
        samples, tokens, targets, documents = (
            np.concatenate([array, array[:1].repeat(missing, axis=0)])
            for array in (self.samples, self.tokens, self.targets, self.documents)
        )
        silent = np.zeros((missing, self.loss_mask.shape[1]), bool)
        return Batch(samples, tokens, targets, np.concatenate([self.loss_mask, silent]), documents)


@dataclass(frozen=True)
class DpShare:
    """One data-parallel rank's samples of a global batch, and what it must know of the others'."""

    mine: Batch
    samples: NDArray[np.int64]  # of the global batch
    loss_tokens: int  # of the global batch


def read_batch(
    row: TokenRow, seq: int, seed: int, samples: Sequence[int] | NDArray[np.int64], vocab: int | None = None
) -> Batch:
    """Read the given samples of the order that `seed` names. Ids at or above `vocab` are refused."""
    wanted = np.asarray(samples, np.int64)
    read = [read_window(row, start, start + seq + 1, vocab) for start in _starts(row, seq, seed, wanted)]
    size = (len(read), seq + 1)
    tokens = np.concatenate([window.tokens for window in read]).reshape(size) if read else np.empty(size, np.int64)
    loss = np.concatenate([window.loss for window in read]).reshape(size) if read else np.empty(size, bool)
    documents = np.stack([_number_documents(window.documents[:-1]) for window in read]) if read else np.empty((0, seq))
    return Batch(
        samples=wanted,
        tokens=tokens[:, :-1].astype(np.int64, copy=False),
        targets=tokens[:, 1:].astype(np.int64, copy=False),
        loss_mask=loss[:, 1:],
        documents=documents.astype(np.int32),
    )


def read_share(
    row: TokenRow, seq: int, seed: int, samples: Sequence[int], vocab: int, parts: int, number: int
) -> DpShare:
    """Share `number` of `parts` of a global batch. Of the others' samples only masks are read, and only to count.

    The others' tokens also count as read: the ranks of a node check each other's files (`data/integrity.py`).
    """
    wanted = np.asarray(samples, np.int64)
    shares = np.split(wanted, parts)
    mine = read_batch(row, seq, seed, shares.pop(number), vocab)
    count = mine.loss_tokens
    for start in _starts(row, seq, seed, np.concatenate([wanted[:0], *shares])):
        row.touch(start, start + seq + 1)
        count += row.loss_tokens(start + 1, start + seq + 1)
    return DpShare(mine, wanted, count)


def _starts(row: TokenRow, seq: int, seed: int, samples: NDArray[np.int64]) -> list[int]:
    """Where the windows of samples begin."""
    starts: list[int] = (window_of(samples, windows(row.tokens, seq), seed) * seq).tolist()
    return starts


def _number_documents(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same documents, numbered from 0."""
    return np.cumsum(np.diff(documents, prepend=documents[:1]) != 0)
