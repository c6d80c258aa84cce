import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        found = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx, gradient):
        found = gradient.new_empty(sum(ctx.sent), *gradient.shape[1:])
        dist.all_to_all_single(found, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return found, None, None, None


class ExpertParallelMoE(nn.Module):
    def __init__(self, router: Tensor, up: Tensor, down: Tensor, top: int, group: dist.ProcessGroup):
        super().__init__()
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.top, self.ranks = group, top, ranks
        self.experts, self.own = len(up), len(up) // ranks
        self.router = nn.Parameter(router.clone())
        self.up = nn.Parameter(up.chunk(ranks)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = (x @ self.router.T).topk(self.top)
        weights = scores.softmax(-1).reshape(-1)
        expert, order = chosen.reshape(-1).sort(stable=True)
        token = order // self.top
        counts = torch.bincount(expert, minlength=self.experts).view(self.ranks, self.own)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = Exchange.apply(x[token], sent, received, self.group)
        of_expert = torch.arange(self.own).repeat(self.ranks).repeat_interleave(theirs.reshape(-1))
        results = torch.zeros_like(arrived)
        for number in range(self.own):
            mine = of_expert == number
            inner = F.gelu(F.linear(arrived[mine], self.up[number]))
            results = results.index_put((mine,), F.linear(inner, self.down[number]))
        back = Exchange.apply(results, received, sent, self.group)
        return torch.zeros_like(x).index_add(0, token, back * weights[order].unsqueeze(-1))
