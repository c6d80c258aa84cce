"""Which queries see which keys: documents in one row (`DocumentMask`), and sliding windows (`WindowMask`).

If rows contain several documents, a `DocumentSpan` is a rectangle of the score matrix whose queries see its keys.
Document numbers never decrease along a row. So a causal square splits into smaller causal squares, one per document;
and if all keys come before all queries, only the keys' last document can also be the queries' first, which leaves one
rectangle per row: a few first queries and a few last keys. The kernels need no mask of single scores, and scores
outside of all spans are not computed. Spans are computed on the host, from arrays that it has, without a wait.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.model.layers import accum_dtype

Documents = NDArray[np.integer]


class DocumentSpan(NamedTuple):
    row: int
    queries: slice
    keys: slice


class Packed(NamedTuple):
    """Spans as the variable-length kernels take them: rows of [B * S], and the start of each span among them.

    The number of spans and the length of the longest are constants of a graph: both are rounded up to powers of two, by
    empty spans after the last, so that a compiled block has a few graphs and not one for each microbatch.
    """

    queries: Tensor | None  # None: all rows in order
    keys: Tensor | None
    query_starts: Tensor  # int32 [spans + 1]
    key_starts: Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class DocumentMask:
    spans: tuple[DocumentSpan, ...]
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
        """The rows of the pieces among [B * S] (None: all), where each piece starts among them, the longest one."""
        lengths = [piece.stop - piece.start for _, piece in pieces]
        padding = [0] * (_next_power(len(lengths)) - len(lengths))
        starts = torch.tensor(np.cumsum([0, *lengths, *padding]), dtype=torch.int32)
        index = None
        if sum(lengths) < self.rows * width:
            places = [np.arange(row * width + piece.start, row * width + piece.stop) for row, piece in pieces]
            index = torch.from_numpy(np.concatenate(places)).to(self.device)
        return index, starts.to(self.device), _next_power(max(lengths))


def _next_power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


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
    if (np.diff(documents, axis=1) < 0).any():
        row = int(np.flatnonzero((np.diff(documents, axis=1) < 0).any(axis=1))[0])
        raise ValueError(
            f"the document numbers of row {row} fall along the row; attention over several ranks, and packed attention "
            "on a GPU, need every document in one run, numbered in order"
        )


# ---- sliding windows ------------------------------------------------------------------------------------------------
# Sliding-window attention by plain matmuls, for a strip of queries at a time (`WindowBand`).
#
# A query at position p sees the keys at p - window + 1 ... p of its document. Positions ascend along both sides, so
# a strip of neighbouring queries sees one slice of the keys, not much longer than the strip, and a mask within it. The
# scores of one strip are held at a time: for B rows and H heads B H n (n + window) elements, n the queries of a strip,
# in the accumulate dtype. Any part of the scores can be computed like this, also those with another rank's keys.


_STRIP = 128  # queries, at least: fewer would leave a device idle


class WindowBand(NamedTuple):
    queries: slice
    keys: slice
    seen: Tensor  # bool [B or 1, 1, 1, queries, keys]


@dataclass(frozen=True)
class WindowMask:
    bands: tuple[WindowBand, ...]  # no two share a query

    @classmethod
    def of(
        cls,
        queries: NDArray[np.int64],
        keys: NDArray[np.int64],
        documents: tuple[Documents, Documents] | None,
        window: int,
        device: torch.device,
    ) -> "WindowMask":
        """`queries` [Sq] and `keys` [Sk] are positions, `documents` those at them, [B, Sq] and [B, Sk]."""
        bands, step = [], max(window, _STRIP)
        for start in range(0, len(queries), step):
            at_q = slice(start, min(start + step, len(queries)))
            strip = queries[at_q]
            low, high = (int(at) for at in np.searchsorted(keys, (strip[0] - window + 1, strip[-1] + 1)))
            at_k = slice(low, high)
            distance = strip[:, None] - keys[at_k]
            seen = ((distance >= 0) & (distance < window))[None]
            if documents is not None:
                seen = seen & (documents[0][:, at_q, None] == documents[1][:, None, at_k])
            if seen.any():
                bands.append(WindowBand(at_q, at_k, torch.from_numpy(seen[:, None, None]).to(device)))
        return cls(tuple(bands))


class Attended(NamedTuple):
    """What a forward pass of attention read and said. Output and LSE are those of full rows of scores, of which the
    keys here may be a part."""

    q: Tensor  # [B, H, Sq, D]
    k: Tensor  # [B, K, Sk, D]
    v: Tensor
    out: Tensor  # [B, H, Sq, D]
    lse: Tensor  # [B, H, Sq]


def forward(q: Tensor, k: Tensor, v: Tensor, mask: WindowMask) -> tuple[Tensor, Tensor]:
    """q [B, H, Sq, D], k and v [B, K, Sk, D] -> output [B, H, Sq, D], LSE [B, H, Sq]; -inf where nothing is seen."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=accum_dtype(q.dtype))
    for band in mask.bands:
        scores, values = _scores(q, k, band), _part(v, band.keys)[:, :, None]
        band_lse = scores.logsumexp(-1)
        band_out = _exp(scores, band_lse) @ values
        out[:, :, band.queries], lse[:, :, band.queries] = band_out.flatten(1, 2).to(q.dtype), band_lse.flatten(1, 2)
    return out, lse


def backward(grad: Tensor, of: Attended, mask: WindowMask) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.backward`. Sums are in the accumulate dtype."""
    q, k, v, out, lse = of
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    groups, scale = (k.shape[1], -1), q.shape[-1] ** -0.5
    for band in mask.bands:
        at_q, at_k = band.queries, band.keys
        band_grad, band_q, band_out, band_lse = (_part(x, at_q).unflatten(1, groups) for x in (grad, q, out, lse))
        p, values = _exp(_scores(q, k, band), band_lse), _part(v, at_k)[:, :, None]
        ds = p * (band_grad @ values.mT - (band_grad * band_out).sum(-1, keepdim=True)) * scale
        dq[:, :, at_q] = (ds @ _part(k, at_k)[:, :, None]).flatten(1, 2)
        dk[:, :, at_k] += (ds.mT @ band_q).sum(2)
        dv[:, :, at_k] += (p.mT @ band_grad).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, band: WindowBand) -> Tensor:
    """[B, K, H/K, queries, keys]"""
    grouped_q = _part(q, band.queries).unflatten(1, (k.shape[1], -1))
    scores = grouped_q @ _part(k, band.keys)[:, :, None].mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~band.seen, -math.inf)


def _exp(scores: Tensor, lse: Tensor) -> Tensor:
    """Probabilities; all zero in a row that sees no key."""
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])


def _part(x: Tensor, places: slice) -> Tensor:
    return x[:, :, places].to(accum_dtype(x.dtype))
