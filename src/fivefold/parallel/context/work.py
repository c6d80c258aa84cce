"""Work: a tile with the documents in it, and how its part is added to a rank's results."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.model import attention
from fivefold.model.dtypes import wide
from fivefold.model.recompute import kept
from fivefold.model.spans import Documents, Spans, causal_spans, full_spans
from fivefold.parallel.context.tiles import Tile
from fivefold.parallel.mesh import Axis


@dataclass(frozen=True)
class Work:
    tile: Tile
    spans: Spans | None = None  # None: no document ends within the tile

    @classmethod
    def of(cls, tile: Tile, queries: Documents, keys: Documents, device: torch.device) -> "Work | None":
        """`queries` [B, S/c] and `keys` are the documents here and of the keys at hand. None: nothing sees anything.

        Where documents end early, a rank has less to do, and how much is no longer the same on all ranks.
        """
        asking = queries[:, tile.queries.start : tile.queries.stop]
        asked = keys[:, tile.keys.start : tile.keys.stop]
        spans = causal_spans(asking, device) if tile.causal else full_spans(asking, asked, device)
        if not spans.spans:
            return None
        whole = (slice(0, len(tile.queries)), slice(0, len(tile.keys)))
        if len(spans.spans) == len(asking) and all(span[1:] == whole for span in spans.spans):
            return cls(tile)
        return cls(tile, spans)


Works = list[Work | None]
Forward = Callable[[Tensor, Tensor, Tensor, Works, Axis], tuple[Tensor, Tensor]]


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


class Gradients:
    """The backward pass of the same, whose results are q, out and lse."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor):
        self.saved = (grad, q, out, lse)
        self.q = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)

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


def forward_and_save(ctx: Any, forward: Forward, q: Tensor, k: Tensor, v: Tensor, works: Works, axis: Axis) -> Tensor:
    """The forward pass of an autograd function over `forward`, which gives output and LSE; backward needs both."""
    out, lse = kept(partial(forward, q, k, v, works, axis), 2, q)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.works, ctx.axis = works, axis
    return out


def _part(x: Tensor, places: range) -> Tensor:
    """Some tokens of [B, heads, S, D], of [B, heads, S], or of a stack of the former."""
    dim = 2 if x.ndim < 5 else 3
    return x.narrow(dim, places.start, len(places))
