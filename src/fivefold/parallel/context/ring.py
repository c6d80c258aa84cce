"""Ring attention: keys and values travel around the ranks, and each merges what its queries see in them.

In each of c steps a rank works with the keys of one rank, while they travel on to the next. Backward goes around again;
the gradient of the keys and values follows them one step behind, and the last step brings it home.

Payload of a rank, for a layer and a microbatch of B rows of S tokens, K kv heads (of this tp rank) of D:

    forward    c-1 sends of 2 B K S/c D elements, in the compute dtype
    backward   c-1 sends of 2 B K S/c D elements, in the compute dtype
               c   sends of 2 B K S/c D elements, in the accumulate dtype (float32, or float64)

and as many receives. Full recompute sends forward's again; selective recompute keeps output and LSE, and sends nothing.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.parallel.collectives import Exchange
from fivefold.parallel.context.work import Gradients, OnlineSoftmax, Works, forward_and_save
from fivefold.parallel.mesh import Axis


def _forward(q: Tensor, k: Tensor, v: Tensor, works: Works, axis: Axis) -> OnlineSoftmax:
    seen, kv = OnlineSoftmax(q), torch.stack((k, v))
    for work in works[:-1]:
        coming = Exchange(kv, axis)
        seen.add(work, kv)
        kv = coming.wait()
    seen.add(works[-1], kv)
    return seen


class Ring(torch.autograd.Function):
    """q [B, H, S/c, D], k and v [B, K, S/c, D] -> [B, H, S/c, D]. `works` are in the order of the steps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, works: Works, axis: Axis) -> Tensor:
        return forward_and_save(ctx, _forward, q, k, v, sinks, works, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        works, axis = ctx.works, ctx.axis
        gradients, kv = Gradients(grad, q, out, lse, sinks), torch.stack((k, v))
        follows: Exchange | None = None
        for step, work in enumerate(works):
            coming = Exchange(kv, axis) if step < len(works) - 1 else None
            part = torch.zeros(kv.shape, dtype=gradients.q.dtype, device=kv.device)
            gradients.add(work, kv, part)
            if follows is not None:
                part += follows.wait()
            follows = Exchange(part, axis)
            if coming is not None:
                kv = coming.wait()
        assert follows is not None
        dk, dv = follows.wait().to(k.dtype)
        return gradients.q.to(q.dtype), dk, dv, gradients.sinks, None, None
