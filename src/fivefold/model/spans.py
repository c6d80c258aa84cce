"""Spans: where rows hold several documents, which queries see which keys, as rectangles of the score matrix.

Documents are runs: along a row their numbers never fall. So a causal square breaks into smaller causal squares, one per
run; and where every key comes before every query, only the keys' last document can also be the queries' first, and one
rectangle per row is left: a few first queries against a few last keys. Nothing needs a mask, and what no document spans
is not computed. All of it is found on the host, from arrays that are there anyway; no device waits.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Documents = NDArray[np.integer]


class Span(NamedTuple):
    row: int
    queries: slice
    keys: slice


class Packed(NamedTuple):
    """Spans as the variable-length kernels want them: rows of [B * S], and where each span begins among them.

    How many spans there are and how long the longest is are constants of a graph: both are rounded up to powers of two,
    with spans of no rows behind the last, so that a compiled block has a few graphs and not one for each microbatch.
    """

    queries: Tensor | None  # None: all rows in order
    keys: Tensor | None
    query_starts: Tensor  # int32 [spans + 1]
    key_starts: Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class Spans:
    spans: tuple[Span, ...]
    rows: int  # B
    queries: int  # of a row, in a span or not
    keys: int
    device: torch.device

    @cached_property
    def packed(self) -> Packed:
        queries, query_starts, most_queries = self._pack([(s.row, s.queries) for s in self.spans], self.queries)
        keys, key_starts, most_keys = self._pack([(s.row, s.keys) for s in self.spans], self.keys)
        # A bound of one query would have flash attention take a decoding shortcut, with an LSE of another shape.
        return Packed(queries, keys, query_starts, key_starts, max(2, most_queries), most_keys)

    def _pack(self, pieces: list[tuple[int, slice]], width: int) -> tuple[Tensor | None, Tensor, int]:
        lengths = [piece.stop - piece.start for _, piece in pieces]
        nothing = [0] * (_rounded(len(lengths)) - len(lengths))
        starts = torch.tensor(np.cumsum([0, *lengths, *nothing]), dtype=torch.int32)
        index = None
        if sum(lengths) < self.rows * width:
            places = [np.arange(row * width + piece.start, row * width + piece.stop) for row, piece in pieces]
            index = torch.from_numpy(np.concatenate(places)).to(self.device)
        return index, starts.to(self.device), _rounded(max(lengths))


def _rounded(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def causal_spans(documents: Documents, device: torch.device) -> Spans:
    """Of a square in which query i may see keys up to i. documents [B, S]."""
    rows, width = documents.shape
    spans = []
    for row in range(rows):
        cuts = [0, *(np.flatnonzero(np.diff(documents[row])) + 1).tolist(), width]
        runs = [slice(a, b) for a, b in pairwise(cuts)]
        spans += [Span(row, run, run) for run in runs]
    return Spans(tuple(spans), rows, width, width, device)


def full_spans(queries: Documents, keys: Documents, device: torch.device) -> Spans:
    """Of a rectangle in which every key comes before every query. queries [B, Sq], keys [B, Sk]."""
    rows, width = keys.shape
    spans = []
    for row in range(rows):
        shared = keys[row, -1]
        seeing = int(np.count_nonzero(queries[row] == shared))
        if seeing:
            seen = int(np.count_nonzero(keys[row] == shared))
            spans.append(Span(row, slice(0, seeing), slice(width - seen, width)))
    return Spans(tuple(spans), rows, queries.shape[1], width, device)


def check_runs(documents: Documents) -> None:
    if (np.diff(documents, axis=1) < 0).any():
        row = int(np.flatnonzero((np.diff(documents, axis=1) < 0).any(axis=1))[0])
        raise ValueError(
            f"the document numbers of row {row} fall along the row; attention over several ranks, and packed attention "
            "on a GPU, need every document in one run, numbered in order"
        )
