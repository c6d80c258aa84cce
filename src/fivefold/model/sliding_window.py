"""Sliding-window attention by plain matmuls, for a strip of queries at a time (`WindowBand`).

A query at position p sees the keys at p - window + 1 ... p of its document. Positions ascend along both sides, so
a strip of neighbouring queries sees one slice of the keys, not much longer than the strip, and a mask within it. The
scores of one strip are held at a time: for B rows and H heads B H n (n + window) elements, n the queries of a strip,
in the accumulate dtype. Any part of the scores can be computed like this, also those with another rank's keys.
Shapes: B batch, H heads, K kv heads, Sq queries, Sk keys, D head dim.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.model.layers import accum_dtype
from fivefold.model.masks import Attended, Documents

_MIN_STRIP = 128  # queries: fewer would leave a device idle


class WindowBand(NamedTuple):
    """A strip of queries, the keys that any of them sees, and which query sees which."""

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
        bands, strip_length = [], max(window, _MIN_STRIP)
        for start in range(0, len(queries), strip_length):
            at_q = slice(start, min(start + strip_length, len(queries)))
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


def window_forward(q: Tensor, k: Tensor, v: Tensor, mask: WindowMask) -> tuple[Tensor, Tensor]:
    """q [B, H, Sq, D], k and v [B, K, Sk, D] -> output [B, H, Sq, D], LSE [B, H, Sq]; -inf where nothing is seen."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=accum_dtype(q.dtype))
    for band in mask.bands:
        scores, values = _scores(q, k, band), _slice_upcast(v, band.keys)[:, :, None]
        band_lse = scores.logsumexp(-1)
        band_out = _probabilities(scores, band_lse) @ values
        out[:, :, band.queries], lse[:, :, band.queries] = band_out.flatten(1, 2).to(q.dtype), band_lse.flatten(1, 2)
    return out, lse


def window_backward(grad: Tensor, of: Attended, mask: WindowMask) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.backward`. Sums are in the accumulate dtype."""
    q, k, v, out, lse = of
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    groups, scale = (k.shape[1], -1), q.shape[-1] ** -0.5
    for band in mask.bands:
        at_q, at_k = band.queries, band.keys
        of_queries = (_slice_upcast(x, at_q).unflatten(1, groups) for x in (grad, q, out, lse))
        band_grad, band_q, band_out, band_lse = of_queries
        p, values = _probabilities(_scores(q, k, band), band_lse), _slice_upcast(v, at_k)[:, :, None]
        ds = p * (band_grad @ values.mT - (band_grad * band_out).sum(-1, keepdim=True)) * scale
        dq[:, :, at_q] = (ds @ _slice_upcast(k, at_k)[:, :, None]).flatten(1, 2)
        dk[:, :, at_k] += (ds.mT @ band_q).sum(2)
        dv[:, :, at_k] += (p.mT @ band_grad).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, band: WindowBand) -> Tensor:
    """[B, K, H/K, queries, keys]"""
    grouped_q = _slice_upcast(q, band.queries).unflatten(1, (k.shape[1], -1))
    scores = grouped_q @ _slice_upcast(k, band.keys)[:, :, None].mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~band.seen, -math.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """The softmax, by the log-sum-exp of whole rows; all zero in a row that sees no key."""
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])


def _slice_upcast(x: Tensor, places: slice) -> Tensor:
    """Positions of x [B, heads, S, ...], in the accumulate dtype."""
    return x[:, :, places].to(accum_dtype(x.dtype))
