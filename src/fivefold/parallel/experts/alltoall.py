"""Tokens to their experts by all-to-all: how many first, then the tokens, and back.

Per layer and microbatch, with n tokens on this rank, K slots each, N rows for this rank's experts, X experts in all:

    forward     X int64 counts; n K rows of E elements out and N in; N out and n K in
    backward    the two of rows again, the other way around

A row is sent once for each slot, to whichever rank has the expert. Full recompute sends forward's again; selective
recompute keeps what came. A rank without tokens, or whose experts got none, takes part like any other.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.model.experts.dispatch import COMBINE, DISPATCH, Compute, places, sorted_slots, weighted
from fivefold.model.experts.grouped import Groups
from fivefold.model.experts.router import Routed
from fivefold.model.recompute import kept
from fivefold.parallel.collectives import all_to_all, wait
from fivefold.parallel.experts.slices import SlicedDispatch


class AllToAllDispatch(SlicedDispatch):
    def run(self, x: Tensor, routed: Routed, compute: Compute, stream: int) -> Tensor:
        with self.sending(DISPATCH):
            order, counts = sorted_slots(routed.chosen), routed.counts
            (coming,) = kept(lambda: (wait(all_to_all(counts, self.ep), self.ep),), 1, counts)
            going, due = self.host.by_rank(counts, coming, self.ep.size, len(order))
            out, back = [sum(rank) for rank in going], [sum(rank) for rank in due]
            # One name for what moves on: what a name held before is let go of, and rows are large.
            rows = AllToAll.apply(x[order // routed.chosen.shape[1]], out, back, self, DISPATCH)
            # They lie rank by rank, and the experts want them expert by expert.
            by_expert = _experts_of(coming, self.ep.size, sum(back)).sort(dim=0, stable=True).indices
            groups, rows = Groups(tuple(map(sum, zip(*due, strict=True))), x.device), rows[by_expert]
        rows = compute(rows, groups)
        with self.sending(COMBINE):
            rows = rows[places(by_expert)]
            rows = AllToAll.apply(rows, back, out, self, COMBINE)
            rows = rows[places(order)]
            return weighted(rows, routed.weights)


def _experts_of(coming: Tensor, ranks: int, rows: int) -> Tensor:
    """Which of this rank's experts each row is for; `coming` [ranks * experts here] are the numbers of these rows."""
    experts = torch.arange(len(coming) // ranks, device=coming.device).repeat(ranks)
    return experts.repeat_interleave(coming, output_size=rows)


class AllToAll(Function):
    """Rows [sum of `out`, E] -> [sum of `back`, E]: so many to each rank, and so many from each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: list[int], back: list[int], by: SlicedDispatch, what: str) -> Tensor:
        ctx.out, ctx.back, ctx.by, ctx.what = out, back, by, what
        (rows,) = kept(lambda: (wait(all_to_all(x, by.ep, out, back), by.ep),), 1, x)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with ctx.by.sending(ctx.what):
            sent = wait(all_to_all(gradient, ctx.by.ep, ctx.back, ctx.out), ctx.by.ep)
        return sent, None, None, None, None
