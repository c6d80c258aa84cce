import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def scattered(x, group):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim=1)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None


class Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SequenceParallelMLP(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor, up: Tensor, down: Tensor, group: dist.ProcessGroup):
        super().__init__()
        self.group, tp, rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        self.up = nn.Parameter(up.chunk(tp)[rank].clone())
        self.down = nn.Parameter(down.chunk(tp, dim=1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.scatter(self.mlp(self.gather(self.norm(x))))

    def norm(self, x: Tensor) -> Tensor:
        weight, bias = (Replicated.apply(one, self.group) for one in (self.weight, self.bias))
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    def gather(self, x: Tensor) -> Tensor:
        return Gather.apply(x, self.group)

    def mlp(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)

    def scatter(self, summand: Tensor) -> Tensor:
        return Scatter.apply(summand, self.group)
