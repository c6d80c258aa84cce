"""Tokens to their experts by all-gather: every ep rank gets all tokens, and computes those of its own experts.

Per layer and microbatch, with at most n tokens on a rank, K slots each, over N ranks:

    forward     all-gathers of N n (E + K) elements and N n K int64, a reduce-scatter of N n E in the accumulate dtype
    backward    reduce-scatters of N n E and N n K elements, an all-gather of N n E, all in the accumulate dtype

It sends N/K times what an all-to-all does or more, in fewer and larger messages, and how much does not depend on the
routing: worth it where ep is about as small as K. What experts said is added up on the way back, rank by rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fivefold.layout.sharding import chunk
from fivefold.model.dtypes import wide
from fivefold.model.experts.dispatch import COMBINE, DISPATCH, Compute
from fivefold.model.experts.grouped import Groups
from fivefold.model.experts.router import Routed
from fivefold.model.recompute import kept
from fivefold.parallel.collectives import all_gather, reduce_scatter, wait
from fivefold.parallel.experts.slices import SlicedDispatch


class AllGatherDispatch(SlicedDispatch):
    def run(self, x: Tensor, routed: Routed, compute: Compute, stream: int) -> Tensor:
        experts, own, most = routed.scores.shape[1], x.shape[0], self._most(stream)
        with self.sending(DISPATCH):
            tokens = Gather.apply(_padded(x, most), self)
            weights = Gather.apply(_padded(routed.weights, most), self)
            chosen = _padded(routed.chosen, most, -1)
            (chosen,) = kept(lambda: (wait(all_gather(chosen, self.ep), self.ep),), 1, chosen)
            here = experts // self.ep.size
            mine = chosen - self.ep.rank * here
            # The slots of this rank's experts, in their order and then the tokens'; all others lie behind.
            of_expert = mine.where((mine >= 0) & (mine < here) & (chosen >= 0), here).flatten()
            counts = torch.bincount(of_expert, minlength=here + 1)[:here]
            groups = Groups(tuple(self.host.by_expert(counts, routed.chosen.numel())), x.device)
            order = of_expert.sort(dim=0, stable=True).indices[: sum(groups.sizes)].clone()
            rows = order // chosen.shape[1]
            theirs = tokens[rows]
        made = compute(theirs, groups)
        with self.sending(COMBINE):
            said = made.to(wide(x.dtype)) * weights.flatten()[order][:, None]
            sums = said.new_zeros(tokens.shape).index_add(0, rows, said)
            return ScatterSum.apply(sums, self)[:own].to(x.dtype)

    def _most(self, stream: int) -> int:
        """Of `stream` tokens those of the rank that routes most."""
        return len(chunk(stream, self.tp.size, 0)) if self.slices else stream


def _padded(x: Tensor, rows: int, value: int = 0) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0]), value=value)


class Gather(Function):
    """[n, ...] of every rank -> [N n, ...]; every rank adds to the gradient of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: SlicedDispatch) -> Tensor:
        ctx.by = by
        (whole,) = kept(lambda: (wait(all_gather(x, by.ep), by.ep),), 1, x)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with ctx.by.sending(DISPATCH):
            total = wait(reduce_scatter(gradient.to(wide(gradient.dtype)), ctx.by.ep), ctx.by.ep)
        return total.to(gradient.dtype), None


class ScatterSum(Function):
    """[N n, ...] summands -> [n, ...]: the sum of this rank's part. All ranks need the gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: SlicedDispatch) -> Tensor:
        ctx.by = by
        (mine,) = kept(lambda: (wait(reduce_scatter(x, by.ep), by.ep),), 1, x)
        return mine

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with ctx.by.sending(COMBINE):
            return wait(all_gather(gradient, ctx.by.ep), ctx.by.ep), None
