"""Which queries see which keys if rows contain several documents: the spans of a `DocumentMask`.

A `DocumentSpan` is a rectangle of the score matrix whose queries see its keys. Document numbers never decrease along a
row. So a causal square splits into smaller causal squares, one per document; and if all keys come before all queries,
only the keys' last document can also be the queries' first, which leaves one rectangle per row: a few first queries and
a few last keys. The kernels need no mask of single scores, and scores outside of all spans are not computed. Spans are
computed on the host, from arrays that it has, without a wait.
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


class DocumentSpan(NamedTuple):
    row: int
    queries: slice
    keys: slice


class PackedSpans(NamedTuple):
    """Spans as flash attention's variable-length kernels take them, by the names that these have.

    The number of spans and the length of the longest are constants of a graph: both are rounded up to powers of two, by
    empty spans after the last, so that a compiled block has a few graphs and not one for each microbatch.
    """

    query_index: Tensor | None  # the queries of all spans among [B * Sq]; None: all, in order
    key_index: Tensor | None  # the same of keys
    cu_seqlens_q: Tensor  # int32 [spans + 1] where the queries of each span start among those of all spans
    cu_seqlens_k: Tensor
    max_seqlen_q: int  # queries of the longest span
    max_seqlen_k: int


@dataclass(frozen=True)
class DocumentMask:
    spans: tuple[DocumentSpan, ...]
    rows: int  # B
    queries: int  # of a row, in a span or not
    keys: int
    device: torch.device

    @cached_property
    def packed(self) -> PackedSpans:
        query_index, cu_seqlens_q, max_seqlen_q = self._pack([(s.row, s.queries) for s in self.spans], self.queries)
        key_index, cu_seqlens_k, max_seqlen_k = self._pack([(s.row, s.keys) for s in self.spans], self.keys)
        # A bound of one query would have flash attention take a decoding shortcut, with an LSE of another shape.
        max_seqlen_q = max(2, max_seqlen_q)
        return PackedSpans(query_index, key_index, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)

    def _pack(self, pieces: list[tuple[int, slice]], width: int) -> tuple[Tensor | None, Tensor, int]:
        """One side of the spans, a (row, slice) each, in rows of `width`: index, cumulative lengths, longest length."""
        lengths = [piece.stop - piece.start for _, piece in pieces]
        padding = [0] * (_next_power_of_two(len(lengths)) - len(lengths))
        cu_seqlens = torch.tensor(np.cumsum([0, *lengths, *padding]), dtype=torch.int32)
        index = None
        if sum(lengths) < self.rows * width:
            places = [np.arange(row * width + piece.start, row * width + piece.stop) for row, piece in pieces]
            index = torch.from_numpy(np.concatenate(places)).to(self.device)
        return index, cu_seqlens.to(self.device), _next_power_of_two(max(lengths))


def causal_spans(documents: Documents, device: torch.device) -> DocumentMask:
    """The spans of a causal square, in which query i sees keys up to i. documents [B, S]."""
    rows, width = documents.shape
    spans = []
    for row in range(rows):
        cuts = [0, *(np.flatnonzero(np.diff(documents[row])) + 1).tolist(), width]
        runs = [slice(a, b) for a, b in pairwise(cuts)]
        spans += [DocumentSpan(row, run, run) for run in runs]
    return DocumentMask(tuple(spans), rows, width, width, device)


def full_spans(queries: Documents, keys: Documents, device: torch.device) -> DocumentMask:
    """The spans of a rectangle in which all keys come before all queries. queries [B, Sq], keys [B, Sk]."""
    rows, width = keys.shape
    spans = []
    for row in range(rows):
        document = keys[row, -1]  # the only one that can be on both sides
        in_queries = int(np.count_nonzero(queries[row] == document))
        if in_queries:
            in_keys = int(np.count_nonzero(keys[row] == document))
            spans.append(DocumentSpan(row, slice(0, in_queries), slice(width - in_keys, width)))
    return DocumentMask(tuple(spans), rows, queries.shape[1], width, device)


def check_runs(documents: Documents) -> None:
    """Raise an error where document numbers [B, S] fall along a row: the spans above count on one run for each."""
    if (np.diff(documents, axis=1) < 0).any():
        row = int(np.flatnonzero((np.diff(documents, axis=1) < 0).any(axis=1))[0])
        raise ValueError(
            f"the document numbers of row {row} fall along the row; attention over several ranks, and packed attention "
            "on a GPU, need every document in one run, numbered in order"
        )


class Attended(NamedTuple):
    """What a forward pass of attention read and gave. Output and LSE are those of full rows of scores, of which the
    keys here may be a part."""

    q: Tensor  # [B, H, Sq, D]
    k: Tensor  # [B, K, Sk, D]
    v: Tensor
    out: Tensor  # [B, H, Sq, D]
    lse: Tensor  # [B, H, Sq]


def _next_power_of_two(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
