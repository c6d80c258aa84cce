import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def gathered(shard, size, group):
    ranks = dist.get_world_size(group)
    most = -(-size // ranks)
    padded = F.pad(shard, (0, most - len(shard)))
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: len(range(size)[slice(*bounds(size, ranks, rank))])] for rank, part in enumerate(parts)])


def bounds(size, ranks, rank):
    small, more = divmod(size, ranks)
    first = rank * small + min(rank, more)
    return first, first + small + (rank < more)


def mean_of_shard(flat, group):
    ranks = dist.get_world_size(group)
    most = -(-len(flat) // ranks)
    parts = [F.pad(part, (0, most - len(part))) for part in torch.tensor_split(flat, ranks)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    first, end = bounds(len(flat), ranks, dist.get_rank(group))
    return own[: end - first] / ranks


class ZeroOneSGD:
    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float, group: dist.ProcessGroup):
        self.parameters, self.group = parameters, group
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        shard = torch.tensor_split(flat, dist.get_world_size(group))[dist.get_rank(group)]
        self.shard, self.size = nn.Parameter(shard.clone()), len(flat)
        self.optimizer = torch.optim.SGD([self.shard], lr=lr, momentum=momentum)

    def step(self) -> None:
        self.shard.grad = mean_of_shard(torch.cat([one.grad.reshape(-1) for one in self.parameters]), self.group)
        self.optimizer.step()
        whole = gathered(self.shard.detach(), self.size, self.group)
        with torch.no_grad():
            sizes = [one.numel() for one in self.parameters]
            for parameter, values in zip(self.parameters, whole.split(sizes), strict=True):
                parameter.copy_(values.view_as(parameter))


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, group):
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.group = shape, group
        return F.linear(x, gathered(shard, shape.numel(), group).view(shape))

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        weight = gathered(shard, ctx.shape.numel(), ctx.group).view(ctx.shape)
        of_shard = mean_of_shard((gradient.T @ x).reshape(-1), ctx.group)
        return gradient @ weight, of_shard, None, None


class ShardedLinear(nn.Module):
    def __init__(self, weight: Tensor, group: dist.ProcessGroup):
        super().__init__()
        self.shape, self.group = weight.shape, group
        shard = torch.tensor_split(weight.reshape(-1), dist.get_world_size(group))[dist.get_rank(group)]
        self.weight = nn.Parameter(shard.clone())

    def forward(self, x: Tensor) -> Tensor:
        return Gathered.apply(x, self.weight, self.shape, self.group)
