"""All-gather attention (Llama 3's, arXiv 2407.21783, section 3.3.2): every rank gets all keys and values at once.

The zigzag's shares are kept, for the balance. A rank's own tile needs nothing of the others and runs under the gather;
what is left is two rectangles. Only the rank's own keys and values are kept for backward, which gathers again.

What a rank hands in, for a layer and a microbatch of B rows of S tokens, K kv heads (of this tp rank) of D:

    forward    1 all-gather     2 B K S/c D elements, in the compute dtype
    backward   1 all-gather     2 B K S/c D elements, in the compute dtype
               1 reduce-scatter 2 B K S D   elements, in the accumulate dtype (float32, or float64)

Full recompute gathers once more; selective recompute keeps output and LSE, and does not.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.parallel.collectives import all_gather, reduce_scatter, wait
from fivefold.parallel.context.work import Gradients, OnlineSoftmax, Works, forward_and_save
from fivefold.parallel.mesh import Axis


def by_position(shares: Tensor, ranks: int) -> Tensor:
    """Shares one after the other, [c * 2, B, K, S/c, D] -> [2, B, K, S, D]."""
    early, late = shares.unflatten(0, (ranks, 2)).chunk(2, dim=-2)
    return torch.cat((*early, *late.flip(0)), dim=-2)


def by_rank(whole: Tensor, ranks: int) -> Tensor:
    """The way back: [2, B, K, S, D] -> [c * 2, B, K, S/c, D]."""
    early, late = whole.unflatten(-2, (2, ranks, -1)).unbind(-4)  # [2, B, K, c, S/2c, D]
    return torch.cat((early, late.flip(-3)), dim=-2).movedim(-3, 0).flatten(0, 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, works: Works, axis: Axis) -> OnlineSoftmax:
    seen, kv = OnlineSoftmax(q), torch.stack((k, v))
    coming = all_gather(kv, axis)
    seen.add(works[0], kv)
    rows = by_position(wait(coming, axis), axis.size)
    for work in works[1:]:
        seen.add(work, rows)
    return seen


class AllGather(torch.autograd.Function):
    """q [B, H, S/c, D], k and v [B, K, S/c, D] -> [B, H, S/c, D]. `works`: the own tile, then those of all keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, works: Works, axis: Axis) -> Tensor:
        return forward_and_save(ctx, _forward, q, k, v, sinks, works, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        works, axis = ctx.works, ctx.axis
        gradients, kv = Gradients(grad, q, out, lse, sinks), torch.stack((k, v))
        coming = all_gather(kv, axis)
        own = torch.zeros(kv.shape, dtype=gradients.q.dtype, device=kv.device)
        gradients.add(works[0], kv, own)
        rows = by_position(wait(coming, axis), axis.size)
        whole = torch.zeros(rows.shape, dtype=own.dtype, device=own.device)
        for work in works[1:]:
            gradients.add(work, rows, whole)
        dk, dv = (wait(reduce_scatter(by_rank(whole, axis.size), axis), axis) + own).to(k.dtype)
        return gradients.q.to(q.dtype), dk, dv, gradients.sinks, None, None
