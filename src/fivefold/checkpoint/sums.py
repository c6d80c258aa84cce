"""Sums of files in memory: Fletcher's, in columns, and sha256 of those.

    parts = segments(extents(tensors, file))      # what is summed together; each by any thread, in any order
    total([segment_sum(...) for part in parts])   # 'fletcher:3af1...'

Only their owner can write such files, so what they are checked for is accidents, and the sum may be one that costs
little beside the copy: one addition a word, five times as fast as the sha256 of a processor that has instructions for
it. A file is words of 64 bits, in rows of 8191. Each column has two sums: of its words, and of its words times the
number of pieces, of a MiB, that are left. After 8 MiB new sums begin. What lies between chunks is left out.

Whatever changes in one stretch of up to 65528 bytes is found for sure. So are two flipped bits anywhere, unless they
are the same bit of two words that are a multiple of 65528 bytes apart, which is no distance at which memory repeats
itself. Of damage without a pattern one case in 2^64 is missed. No torch.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fivefold.checkpoint.tensors import Tensors

_WIDTH = 8191  # words, prime: whatever recurs at powers of two falls into different columns
_WORD = np.dtype("<u8")
_ROW = _WIDTH * _WORD.itemsize
_PIECE = 16 * _ROW  # bytes that are read at a time, and summed while the cache has them
_SEGMENT = 1 << 23
PREFIX = "fletcher:"

Extent = tuple[int, int]  # of a file: the first byte, and how many


class Columns:
    """The sums of a segment."""

    def __init__(self) -> None:
        self.sums = np.zeros((2, _WIDTH), _WORD)

    def add(self, start: int, data: memoryview) -> None:
        """The bytes of a piece, which begins with this byte of the file. Whatever lies so many bytes behind another is
        so many columns behind it."""
        whole = np.frombuffer(data, np.uint8)
        if odd := len(whole) % _WORD.itemsize:
            whole = np.pad(whole, (0, _WORD.itemsize - odd))
        words, (plain, weighted) = whole.view(_WORD), self.sums
        column = start // _WORD.itemsize % _WIDTH
        first, words = words[: _WIDTH - column], words[_WIDTH - column :]
        plain[column : column + len(first)] += first
        rows, rest = divmod(len(words), _WIDTH)
        if rows:
            plain += words[: rows * _WIDTH].reshape(rows, _WIDTH).sum(axis=0, dtype=_WORD)
        if rest:
            plain[:rest] += words[rows * _WIDTH :]
        weighted += plain

    def digest(self) -> bytes:
        return hashlib.sha256(self.sums.data).digest()


def extents(tensors: Tensors, file: str) -> list[Extent]:
    """Where the chunks of a file are, in the order of their bytes."""
    return sorted(
        (chunk.start, chunk.bytes) for stored in tensors.values() for chunk in stored.chunks if chunk.file == file
    )


def segments(chunks: Iterable[Extent]) -> list[list[Extent]]:
    """The pieces in which chunks are read, and which of them are summed together."""
    found: list[list[Extent]] = []
    held = _SEGMENT
    for start, size in chunks:
        for first in range(0, size, _PIECE):
            if held >= _SEGMENT:
                found.append([])
                held = 0
            found[-1].append((start + first, min(_PIECE, size - first)))
            held += found[-1][-1][1]
    return found


def segment_sum(pieces: Sequence[Extent], read: Callable[[int, int], memoryview]) -> bytes:
    """`read` gives the bytes of a piece."""
    columns = Columns()
    for start, size in pieces:
        columns.add(start, read(start, size))
    return columns.digest()


def total(sums: Iterable[bytes]) -> str:
    """Of all segments, in their order."""
    return PREFIX + hashlib.sha256(b"".join(sums)).hexdigest()


def sum_of(chunks: Iterable[Extent], read: Callable[[int, int], memoryview]) -> str:
    """Of a whole file."""
    return total(segment_sum(pieces, read) for pieces in segments(chunks))


def short(found: str) -> str:
    """For people: which kind, and how it begins."""
    kind, _, digits = found.rpartition(":")
    return f"{f'sum ({kind})' if kind else 'sha256'} is {digits[:16]}..."
