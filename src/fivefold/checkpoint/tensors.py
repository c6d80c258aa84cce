"""The table of a checkpoint's tensors, `tensors.json`: which bytes of which file have which part of a tensor.

{"model.norm.weight": {"shape": [32], "dtype": "float32", "chunks": [[[0], [16], "rank-0.tensors", 8192, 64], ...]}}

A chunk is a box of the tensor: its offsets, its sizes, its file, the first byte in it and the number of bytes. The
bytes are the values in row-major order, little-endian, and nothing else. The table is checked before anything is read
by it. No torch.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from fivefold.support.dtypes import BYTES

TABLE = "tensors.json"
MODEL = "model"
ELEMENT = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8} | BYTES
MOST = 1 << 30  # bytes of a table at most: ten million chunks
_MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 1 << 56
_MAX_CELLS = 1 << 24  # of the grid in which overlaps of chunks are found


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a tensor, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    bytes: int


class Stored(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


Tensors = dict[str, Stored]


def model_key(name: str) -> str:
    """The key of a parameter's master."""
    return f"{MODEL}.{name}"


def merged(parts: list[Tensors]) -> Tensors:
    """The tables of all ranks as one."""
    tensors: Tensors = {}
    chunks: dict[str, list[Chunk]] = {}
    for part in parts:
        for name, stored in part.items():
            tensors.setdefault(name, stored)
            chunks.setdefault(name, []).extend(stored.chunks)
    return {name: msgspec.structs.replace(tensors[name], chunks=tuple(chunks[name])) for name in sorted(tensors)}


def check(tensors: Tensors, files: Mapping[str, int]) -> None:
    """Raises ValueError unless every element is in exactly one chunk, and every chunk within its file.

    `files`: {name: bytes}.
    """
    ranges_by_file: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for name, stored in tensors.items():
        if why := _misfit(stored, files):
            raise ValueError(f"{name[:200]}: {why}")
        for chunk in stored.chunks:
            ranges_by_file[chunk.file].append((chunk.start, chunk.start + chunk.bytes))
    for file, ranges in ranges_by_file.items():
        ranges.sort()
        if any(end > start for (_, end), (start, _) in pairwise(ranges)):
            raise ValueError(f"two chunks share bytes of {file}")


def _misfit(stored: Stored, files: Mapping[str, int]) -> str | None:
    """What is wrong with a tensor's entry; None if nothing is."""
    shape, chunks = stored.shape, stored.chunks
    if stored.dtype not in ELEMENT:
        return f"its dtype {stored.dtype[:50]!r} is none of {', '.join(ELEMENT)}"
    if len(shape) > _MAX_DIMENSIONS or min(shape, default=1) < 1 or math.prod(shape) > _MAX_ELEMENTS:
        return "its shape is none"
    for chunk in chunks:
        box = list(zip(chunk.offsets, chunk.sizes, shape, strict=False))
        if {len(chunk.offsets), len(chunk.sizes)} != {len(shape)} or any(
            first < 0 or size < 1 or first + size > side for first, size, side in box
        ):
            return f"the chunk at {list(chunk.offsets[:8])} is not a box within the shape {list(shape)}"
        needed = math.prod(chunk.sizes) * ELEMENT[stored.dtype]
        if chunk.bytes != needed:
            return f"the chunk at {list(chunk.offsets)} has {chunk.bytes} bytes, and its numbers take {needed}"
        if chunk.start < 0 or chunk.start + chunk.bytes > files.get(chunk.file, -1):
            return f"bytes {chunk.start} to {chunk.start + chunk.bytes} are not in {chunk.file[:200]!r}"
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape) or not _disjoint(chunks, len(shape)):
        return "its chunks do not have every element once"
    return None


def _disjoint(chunks: tuple[Chunk, ...], dims: int) -> bool:
    """Whether no two chunks overlap: each cell of the grid of all their boundaries is in at most one of them."""
    if len(chunks) == 1:
        return True
    sides = [{(chunk.offsets[dim], chunk.sizes[dim]) for chunk in chunks} for dim in range(dims)]
    cut = [dim for dim, distinct in enumerate(sides) if len(distinct) > 1]
    if len(cut) == 1:  # divided in one dimension, as most are
        ranges = sorted((chunk.offsets[cut[0]], chunk.sizes[cut[0]]) for chunk in chunks)
        return all(first + size <= after for (first, size), (after, _) in pairwise(ranges))
    starts = np.array([chunk.offsets for chunk in chunks], np.int64).reshape(-1, dims)
    ends = starts + np.array([chunk.sizes for chunk in chunks], np.int64).reshape(-1, dims)
    cuts = [np.unique(np.concatenate((starts[:, dim], ends[:, dim]))) for dim in range(dims)]
    if math.prod(map(len, cuts)) > _MAX_CELLS:
        return False
    grid = np.zeros([len(cut) - 1 for cut in cuts], bool)
    first = [np.searchsorted(cuts[dim], starts[:, dim]) for dim in range(dims)]
    last = [np.searchsorted(cuts[dim], ends[:, dim]) for dim in range(dims)]
    for number in range(len(chunks)):
        cells = grid[tuple(slice(first[dim][number], last[dim][number]) for dim in range(dims))]
        if cells.any():
            return False
        cells[...] = True
    return True


# ---- checksums ------------------------------------------------------------------------------------------------------
# Checksums of files in memory: Fletcher's, in columns, and sha256 of those.
#
#     parts = segments(extents(tensors, file))      # each can be summed by any thread, in any order
#     total([segment_sum(...) for part in parts])   # 'fletcher:3af1...'
#
# Only their owner can write such files, so the checksum has to detect accidents, and may be a cheap one: one addition
# for each word, five times as fast as sha256 with the processor's instructions for it. A file is words of 64 bits, in
# rows of 8191. Each column has two sums: of its words, and of its words times the number of pieces, of a MiB, that are
# left. After 8 MiB new sums begin. Bytes between chunks are left out.
#
# Any change within up to 65528 consecutive bytes is detected. So are two flipped bits anywhere, unless they are the
# same bit of two words whose distance is a multiple of 65528 bytes, which is no distance at which memory repeats
# itself. Of random damage one case in 2^64 is missed.


_WIDTH = 8191  # words; prime, so that words at distances of powers of two are in different columns
_WORD = np.dtype("<u8")
_ROW = _WIDTH * _WORD.itemsize
_PIECE = 16 * _ROW  # bytes that are read at a time, and summed while the cache has them
_SEGMENT = 1 << 23  # bytes
PREFIX = "fletcher:"

Extent = tuple[int, int]  # the first byte in a file, and the number of bytes


class SegmentSums:
    """The column sums of a segment."""

    def __init__(self) -> None:
        self.sums = np.zeros((2, _WIDTH), _WORD)

    def add(self, start: int, data: memoryview) -> None:
        """Adds the bytes of a piece, which begins at byte `start` of the file; that decides the column of each word."""
        octets = np.frombuffer(data, np.uint8)
        if remainder := len(octets) % _WORD.itemsize:
            octets = np.pad(octets, (0, _WORD.itemsize - remainder))
        words, (plain, weighted) = octets.view(_WORD), self.sums
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
    """The extents of the chunks of a file, in order."""
    return sorted(
        (chunk.start, chunk.bytes) for stored in tensors.values() for chunk in stored.chunks if chunk.file == file
    )


def segments(chunks: Iterable[Extent]) -> list[list[Extent]]:
    """The chunks divided into segments, which are lists of the pieces that are read at a time."""
    result: list[list[Extent]] = []
    segment_size = _SEGMENT
    for start, size in chunks:
        for offset in range(0, size, _PIECE):
            if segment_size >= _SEGMENT:
                result.append([])
                segment_size = 0
            piece = min(_PIECE, size - offset)
            result[-1].append((start + offset, piece))
            segment_size += piece
    return result


def segment_sum(pieces: Sequence[Extent], read: Callable[[int, int], memoryview]) -> bytes:
    """The sum of a segment; `read` returns the bytes of a piece, by start and size."""
    columns = SegmentSums()
    for start, size in pieces:
        columns.add(start, read(start, size))
    return columns.digest()


def total(sums: Iterable[bytes]) -> str:
    """The checksum of a file, from the sums of its segments in order."""
    return PREFIX + hashlib.sha256(b"".join(sums)).hexdigest()


def sum_of(chunks: Iterable[Extent], read: Callable[[int, int], memoryview]) -> str:
    """The checksum of a file with these chunks."""
    return total(segment_sum(pieces, read) for pieces in segments(chunks))


def short(digest: str) -> str:
    """A text with the kind of a hash and its first digits."""
    kind, _, digits = digest.rpartition(":")
    return f"{f'sum ({kind})' if kind else 'sha256'} is {digits[:16]}..."
