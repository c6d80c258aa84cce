"""Pieces into token ids, a batch at a time, one batch ahead of the writer."""

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.data.prefetch import prefetch
from fivefold.data.writing.pieces import Piece
from fivefold.data.writing.sources import Meter
from fivefold.data.writing.tokenizer import Joined, Tokenizer

BATCH = 4 << 20  # characters at a time: enough work for many cores, little enough to hold three times
BATCH_PIECES = 8192


class Encoded(NamedTuple):
    """A batch of tokenized pieces, joined."""

    tokens: NDArray[np.generic]
    lengths: NDArray[np.int64]  # tokens of each piece, its end-of-document token included
    loss: NDArray[np.bool_]  # of each piece
    ends: NDArray[np.bool_]  # whether a piece ends its document
    read: int  # bytes read from disk so far


def encoded(stream: Iterator[Piece], tokenizer: Tokenizer, meter: Meter) -> Iterator[Encoded]:
    """The batches, read and encoded in a background thread: Rust, zlib and file reads leave the interpreter free
    for joining, hashing and writing the batch before."""

    def step() -> tuple[list[Piece], Callable[[], Joined], int]:
        pieces = _take(stream)
        join = tokenizer.encode([piece.text for piece in pieces], [piece.ends for piece in pieces])
        return pieces, join, meter.read()

    with closing(prefetch(repeat(step))) as results:
        for pieces, join, read in results:
            if not pieces:
                return
            loss, ends = [piece.loss for piece in pieces], [piece.ends for piece in pieces]
            yield Encoded(*join(), np.array(loss, bool), np.array(ends, bool), read)


def _take(stream: Iterator[Piece]) -> list[Piece]:
    pieces: list[Piece] = []
    size = 0
    for piece in stream:
        pieces.append(piece)
        size += len(piece.text)
        if size >= BATCH or len(pieces) == BATCH_PIECES:
            break
    return pieces
