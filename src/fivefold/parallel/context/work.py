"""Work: a tile with the documents or the window in it, and how its part is added to a rank's results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.model import attention
from fivefold.model.bands import Bands
from fivefold.model.dtypes import wide
from fivefold.model.recompute import kept
from fivefold.model.spans import Documents, causal_spans, full_spans
from fivefold.parallel.context.tiles import Tile
from fivefold.parallel.mesh import Axis


class Places(NamedTuple):
    """Where tokens stand: their positions [S], ascending, and documents [B, S]."""

    positions: NDArray[np.int64]
    documents: Documents | None

    def at(self, places: NDArray[np.int64] | slice) -> "Places":
        return Places(self.positions[places], None if self.documents is None else self.documents[:, places])

    def part(self, places: range) -> "Places":
        return self.at(slice(places.start, places.stop))


@dataclass(frozen=True)
class Work:
    tile: Tile
    spans: attention.Seen = None  # None: no document ends within the tile

    @classmethod
    def within(cls, tile: Tile, queries: Places, keys: Places, window: int, device: torch.device) -> "Work | None":
        """What is left of a tile in a window."""
        (here, asking), (there, asked) = queries.part(tile.queries), keys.part(tile.keys)
        documents = None if asking is None or asked is None else (asking, asked)
        bands = Bands.of(here, there, documents, window, device)
        return cls(tile, bands) if bands.bands else None

    @classmethod
    def of(cls, tile: Tile, queries: Places, keys: Places, device: torch.device) -> "Work | None":
        """`queries` and `keys` are the tokens here and those whose keys are at hand. None: nothing sees anything.

        Where documents end early, a rank has less to do, and how much is no longer the same on all ranks.
        """
        asking, asked = queries.part(tile.queries).documents, keys.part(tile.keys).documents
        assert asking is not None
        assert asked is not None
        spans = causal_spans(asking, device) if tile.causal else full_spans(asking, asked, device)
        if not spans.spans:
            return None
        whole = (slice(0, len(tile.queries)), slice(0, len(tile.keys)))
        if len(spans.spans) == len(asking) and all(span[1:] == whole for span in spans.spans):
            return cls(tile)
        return cls(tile, spans)


Works = list[Work | None]


@dataclass(frozen=True)
class PartsMask:
    """Which keys a rank's tokens see, part by part. An object, which a graph takes as it is: a list it would look into,
    and be another one where another part is empty."""

    works: Works


class OnlineSoftmax:
    """What queries have seen so far: output [B, H, S/c, D] and LSE [B, H, S/c], in the accumulate dtype."""

    def __init__(self, q: Tensor):
        self.q, dtype = q, wide(q.dtype)
        self.out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)

    def add(self, work: Work | None, kv: Tensor) -> None:
        """At the keys and values at hand, [2, B, K, keys, D]."""
        if work is None:
            return
        q, (k, v) = _part(self.q, work.tile.queries), _part(kv, work.tile.keys)
        out, lse = (_part(x, work.tile.queries) for x in (self.out, self.lse))
        attention.merge_(out, lse, *attention.forward(q, k, v, work.tile.causal, work.spans))

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and LSE, when all keys have been seen."""
        if sinks is not None:
            attention.sink_(self.out, self.lse, sinks)
        return self.out.to(self.q.dtype), self.lse


Forward = Callable[[Tensor, Tensor, Tensor, Works, Axis], OnlineSoftmax]


class Gradients:
    """The backward pass of the same, whose results are q, out and lse."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None):
        self.saved = (grad, q, out, lse)
        self.q = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
        self.sinks = None if sinks is None else attention.sink_grad(grad, out, lse, sinks)

    def add(self, work: Work | None, kv: Tensor, kv_grad: Tensor) -> None:
        """Adds to the gradient of q, and to that of the keys and values at hand; both in the accumulate dtype."""
        if work is None:
            return
        tile = work.tile
        (grad, q, out, lse), (k, v) = (_part(x, tile.queries) for x in self.saved), _part(kv, tile.keys)
        dq, dk, dv = attention.backward(grad, q, k, v, out, lse, tile.causal, work.spans)
        _part(self.q, tile.queries).add_(dq)
        for whole, part in zip(_part(kv_grad, tile.keys), (dk, dv), strict=True):
            whole.add_(part)


def forward_and_save(
    ctx: Any, forward: Forward, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, works: Works, axis: Axis
) -> Tensor:
    """The forward pass of an autograd function over `forward`; backward needs its output and LSE."""
    out, lse = kept(lambda: forward(q, k, v, works, axis).finish(sinks), 2, q)
    ctx.save_for_backward(q, k, v, sinks, out, lse)
    ctx.works, ctx.axis = works, axis
    return out


def _part(x: Tensor, places: range) -> Tensor:
    """Some tokens of [B, heads, S, D], of [B, heads, S], or of a stack of the former."""
    dim = 2 if x.ndim < 5 else 3
    return x.narrow(dim, places.start, len(places))
