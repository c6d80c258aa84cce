"""Bands: attention within a sliding window, a strip of queries at a time, by plain products.

A query at position p sees the keys at p - window + 1 ... p of its document. Positions ascend along both sides, so what
a strip of neighbouring queries sees is one slice of the keys, not much longer than the strip; a mask says the rest.
Scores of one strip are held at a time: of B rows and H heads B H n (n + window) numbers, n the queries of a strip, in
the accumulate dtype. Any part of the scores can be computed so, a rank's own or those with another rank's keys.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.model.dtypes import wide
from fivefold.model.spans import Documents

_STRIP = 128  # queries, at least: fewer would leave a device idle


class Band(NamedTuple):
    queries: slice
    keys: slice
    seen: Tensor  # bool [B or 1, 1, 1, queries, keys]


@dataclass(frozen=True)
class Bands:
    bands: tuple[Band, ...]  # no two share a query

    @classmethod
    def of(
        cls,
        queries: NDArray[np.int64],
        keys: NDArray[np.int64],
        documents: tuple[Documents, Documents] | None,
        window: int,
        device: torch.device,
    ) -> "Bands":
        """`queries` [Sq] and `keys` [Sk] are positions, `documents` those at them, [B, Sq] and [B, Sk]."""
        bands, step = [], max(window, _STRIP)
        for start in range(0, len(queries), step):
            here = slice(start, min(start + step, len(queries)))
            asking = queries[here]
            low, high = (int(at) for at in np.searchsorted(keys, (asking[0] - window + 1, asking[-1] + 1)))
            there = slice(low, high)
            distance = asking[:, None] - keys[there]
            seen = ((distance >= 0) & (distance < window))[None]
            if documents is not None:
                seen = seen & (documents[0][:, here, None] == documents[1][:, None, there])
            if seen.any():
                bands.append(Band(here, there, torch.from_numpy(seen[:, None, None]).to(device)))
        return cls(tuple(bands))


def forward(q: Tensor, k: Tensor, v: Tensor, bands: Bands) -> tuple[Tensor, Tensor]:
    """q [B, H, Sq, D], k and v [B, K, Sk, D] -> output [B, H, Sq, D], LSE [B, H, Sq]; -inf where nothing is seen."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide(q.dtype))
    for band in bands.bands:
        scores, values = _scores(q, k, band), _part(v, band.keys)[:, :, None]
        rows = scores.logsumexp(-1)
        seen = _exp(scores, rows) @ values
        out[:, :, band.queries], lse[:, :, band.queries] = seen.flatten(1, 2).to(q.dtype), rows.flatten(1, 2)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bands: Bands
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention.backward`: `out` and `lse` are those of whole rows of scores. In the accumulate dtype."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    groups, scale = (k.shape[1], -1), q.shape[-1] ** -0.5
    for band in bands.bands:
        here, there = band.queries, band.keys
        gradient, asked, made, rows = (_part(x, here).unflatten(1, groups) for x in (grad, q, out, lse))
        p, values = _exp(_scores(q, k, band), rows), _part(v, there)[:, :, None]
        ds = p * (gradient @ values.mT - (gradient * made).sum(-1, keepdim=True)) * scale
        dq[:, :, here] = (ds @ _part(k, there)[:, :, None]).flatten(1, 2)
        dk[:, :, there] += (ds.mT @ asked).sum(2)
        dv[:, :, there] += (p.mT @ gradient).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, band: Band) -> Tensor:
    """[B, K, H/K, queries, keys]"""
    asked = _part(q, band.queries).unflatten(1, (k.shape[1], -1))
    scores = asked @ _part(k, band.keys)[:, :, None].mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~band.seen, -math.inf)


def _exp(scores: Tensor, lse: Tensor) -> Tensor:
    """Probabilities; a row that sees nothing has none."""
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])


def _part(x: Tensor, places: slice) -> Tensor:
    return x[:, :, places].to(wide(x.dtype))
