"""Ulysses (arXiv 2309.14509): for attention, ranks trade tokens for heads; each sees whole rows, of its heads only.

Where c does not divide the kv heads, they are repeated until it does, to the least common multiple L of K and c; the
copies' gradients add up. Then attention is what it is on one device.

Payload of a rank, for a layer and a microbatch of B rows of S tokens, H heads and K kv heads (of this tp rank) of D, in
the compute dtype:

    forward    1 all-to-all of B (H + 2 L) S/c D elements, 1 of B H S/c D
    backward   the same two, the latter first

Of each, a rank keeps 1/c for itself. Full recompute trades forward's two again; selective recompute keeps what was
traded, and trades nothing.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.model.ops import LocalAttention
from fivefold.model.recompute import kept
from fivefold.parallel.collectives import all_to_all, wait
from fivefold.parallel.mesh import Axis


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, axis: Axis, sinks: Tensor | None = None) -> Tensor:
    """q [B, H, S/c, D], k and v [B, K, S/c, D], sinks [H] -> [B, H, S/c, D].

    `mask` is `LocalAttention`'s, of whole rows.
    """
    copies = axis.size // math.gcd(k.shape[1], axis.size)
    wanted = (q, _repeat(k, copies), _repeat(v, copies))
    divided = [x.unflatten(1, (axis.size, -1)).transpose(0, 1) for x in wanted]  # [c, B, heads/c, S/c, D] each
    heads = [x.shape[2] for x in divided]
    traded = _Trade.apply(torch.cat(divided, dim=2), axis)  # [c, B, (H + 2 L)/c, S/c, D]
    rows = traded.movedim(0, 2).flatten(2, 3)  # [B, (H + 2 L)/c, S, D]
    q, k, v = rows.split(heads, dim=1)
    sinks = None if sinks is None else sinks.chunk(axis.size)[axis.rank]
    seen = LocalAttention().attend(q, k, v, mask, sinks)  # [B, H/c, S, D]
    back = _Trade.apply(seen.unflatten(2, (axis.size, -1)).movedim(2, 0), axis)  # [c, B, H/c, S/c, D]
    return back.transpose(0, 1).flatten(1, 2)


def _repeat(x: Tensor, copies: int) -> Tensor:
    """Each head `copies` times. Not repeat_interleave, whose gradient is added up in no fixed order on CUDA."""
    return x if copies == 1 else x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2)


class _Trade(torch.autograd.Function):
    """Part i of dim 0 goes to rank i. Done twice it undoes itself, so backward is the same again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        (traded,) = kept(lambda: (wait(all_to_all(x, axis), axis),), 1, x)
        return traded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return wait(all_to_all(grad, ctx.axis), ctx.axis), None
