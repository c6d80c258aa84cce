"""The table of a checkpoint's tensors, `tensors.json`: in which file, at which byte, each part of a tensor lies.

{"model.norm.weight": {"shape": [32], "dtype": "float32", "chunks": [[[0], [16], "rank-0.tensors", 8192, 64], ...]}}

A chunk is a box of the tensor: its offsets, its sizes, its file, the first byte in it and the number of bytes. The
bytes are the values in row-major order, little-endian, and nothing else. The table is checked before it is used. No
torch.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

import msgspec
import numpy as np

from fivefold.support.dtypes import DTYPE_BYTES

TABLE_FILE = "tensors.json"
MODEL = "model"
ELEMENT_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8} | DTYPE_BYTES
MAX_TABLE_BYTES = 1 << 30  # ten million chunks
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


def merge_tables(parts: list[Tensors]) -> Tensors:
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
    if stored.dtype not in ELEMENT_BYTES:
        return f"its dtype {stored.dtype[:50]!r} is not one of {', '.join(ELEMENT_BYTES)}"
    if len(shape) > _MAX_DIMENSIONS or min(shape, default=1) < 1 or math.prod(shape) > _MAX_ELEMENTS:
        return "its shape is not valid"
    for chunk in chunks:
        box = list(zip(chunk.offsets, chunk.sizes, shape, strict=False))
        if {len(chunk.offsets), len(chunk.sizes)} != {len(shape)} or any(
            first < 0 or size < 1 or first + size > side for first, size, side in box
        ):
            return f"the chunk at {list(chunk.offsets[:8])} is not a box within the shape {list(shape)}"
        needed = math.prod(chunk.sizes) * ELEMENT_BYTES[stored.dtype]
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
