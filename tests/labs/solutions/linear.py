import torch
import torch.distributed as dist
from torch import nn


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class ColumnParallelLinear(nn.Module):
    def __init__(self, weight, bias, group):
        super().__init__()
        n, r = dist.get_world_size(group), dist.get_rank(group)
        self.group = group
        self.weight = nn.Parameter(weight.chunk(n)[r].clone())
        self.bias = nn.Parameter(bias.chunk(n)[r].clone())

    def forward(self, x):
        return nn.functional.linear(Copy.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, weight, bias, group):
        super().__init__()
        n, r = dist.get_world_size(group), dist.get_rank(group)
        self.group = group
        self.weight = nn.Parameter(weight.chunk(n, dim=1)[r].clone())
        self.bias = nn.Parameter(bias.clone())

    def forward(self, x):
        return Reduce.apply(nn.functional.linear(x, self.weight), self.group) + self.bias
