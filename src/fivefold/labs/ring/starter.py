"""Ring attention. The statement is in README.md; check with `fivefold lab check .`"""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where each rank has a part of the sequence.

    q, k, v are [B, heads, S / ranks, D], float64: rank r has the r-th part of the tokens, and so has the output. Keys
    and values go around the ring, from rank r to rank r + 1; no rank ever has more than two blocks of them. The
    gradients of q, k and v are exact.
    """
    return RingAttention.apply(q, k, v, causal, group)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, group):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        """The gradients of q, k and v, and None for causal and group"""
        raise NotImplementedError
