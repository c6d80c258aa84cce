import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Copy(torch.autograd.Function):
    """What every rank of a group uses: its gradient is a sum."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """A sum over the ranks of a group: its gradient is a copy."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class TensorParallelAttention(nn.Module):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int, kv_heads: int, group: dist.ProcessGroup):
        super().__init__()
        self.group, tp, rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.d = q.shape[0] // heads
        own = range(rank * heads // tp, (rank + 1) * heads // tp)
        shared = heads // kv_heads
        kv = range(own[0] // shared, own[-1] // shared + 1)
        self.of_query = [head // shared - kv[0] for head in own]
        rows, kv_rows = (slice(part[0] * self.d, (part[-1] + 1) * self.d) for part in (own, kv))
        self.q, self.o = nn.Parameter(q[rows].clone()), nn.Parameter(o[:, rows].clone())
        self.k, self.v = nn.Parameter(k[kv_rows].clone()), nn.Parameter(v[kv_rows].clone())
        sharing = max(1, tp // kv_heads)
        self.sharing = None
        for first in range(0, tp, sharing):
            ranks = list(range(first, first + sharing))
            made = dist.new_group(ranks) if sharing > 1 else None
            if rank in ranks:
                self.sharing = made

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        x = Copy.apply(x, self.group)
        k, v = self.k, self.v
        if self.sharing is not None:
            k, v = Copy.apply(k, self.sharing), Copy.apply(v, self.sharing)
        q, k, v = (F.linear(x, weight).unflatten(-1, (-1, self.d)).transpose(1, 2) for weight in (self.q, k, v))
        k, v = k[:, self.of_query], v[:, self.of_query]
        scores = (q @ k.transpose(-1, -2)) * self.d**-0.5
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def project(self, mixed: Tensor) -> Tensor:
        return Sum.apply(F.linear(mixed, self.o), self.group)
