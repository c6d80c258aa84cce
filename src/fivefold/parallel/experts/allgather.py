"""Tokens to their experts by all-gather: every ep rank gets all tokens, and computes those of its own experts.

Per layer and microbatch, with at most n tokens on a rank, K slots each, over N ranks:

    forward     all-gathers of N n (E + K) elements and N n K int64, a reduce-scatter of N n E in the accumulate dtype
    backward    reduce-scatters of N n E and N n K elements, an all-gather of N n E, all in the accumulate dtype

It sends N/K times what an all-to-all does or more, in fewer and larger messages, and how much does not depend on the
routing: worth it where ep is about as small as K. What experts said is added up on the way back, rank by rank.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fivefold.layout.sharding import chunk
from fivefold.model.dtypes import wide
from fivefold.model.experts.dispatch import COMBINE, DISPATCH, Beside, Compute
from fivefold.model.experts.grouped import Groups
from fivefold.model.experts.router import Routed
from fivefold.parallel.collectives import all_gather, reduce_scatter
from fivefold.parallel.experts.slices import SlicedDispatch
from fivefold.parallel.experts.trips import Arrive, SendOff, Tensors, Trip
from fivefold.parallel.mesh import Axis


class AllGatherDispatch(SlicedDispatch):
    travels = True

    def run(
        self, x: Tensor, routed: Routed, compute: Compute, stream: int, beside: Beside = None
    ) -> tuple[Tensor, Tensor | None]:
        experts, own, most = routed.scores.shape[1], x.shape[0], self._most(stream)
        with self.sending(DISPATCH):
            there, choices = Trip(self, DISPATCH, _gather, _sum), Trip(self, DISPATCH, _gather, _sum)
            ticket = SendOff.apply(there, _padded(x, most), _padded(routed.weights, most))
            choice = SendOff.apply(choices, _padded(routed.chosen, most, -1))
        shared = beside() if beside is not None else None
        there.pause()
        with self.sending(DISPATCH):
            tokens, weights = Arrive.apply(there, 2, ticket)
            (chosen,) = Arrive.apply(choices, 1, choice)
            here = experts // self.ep.size
            mine = chosen - self.ep.rank * here
            # The slots of this rank's experts, in their order and then the tokens'; all others lie behind.
            of_expert = mine.where((mine >= 0) & (mine < here) & (chosen >= 0), here).flatten()
            counts = torch.bincount(of_expert, minlength=here + 1)[:here]
            sizes = tuple(self.host.by_expert(counts, routed.chosen.numel()))
            groups = Groups(counts.cumsum(0).int(), sizes)
            order = of_expert.sort(dim=0, stable=True).indices[: sum(sizes)].clone()
            rows = order // chosen.shape[1]
            theirs = tokens[rows]
        made = compute(theirs, groups)
        with self.sending(COMBINE):
            said = made.to(wide(x.dtype)) * weights.flatten()[order][:, None]
            sums = said.new_zeros(tokens.shape).index_add(0, rows, said)
            home = Trip(self, COMBINE, _sum, _gather)
            ticket = SendOff.apply(home, sums)
        home.pause()
        with self.sending(COMBINE):
            (total,) = Arrive.apply(home, 1, ticket)
            return total[:own].to(x.dtype), shared

    def _most(self, stream: int) -> int:
        """Of `stream` tokens those of the rank that routes most."""
        return len(chunk(stream, self.tp.size, 0)) if self.slices else stream


def _padded(x: Tensor, rows: int, value: int = 0) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0]), value=value)


def _gather(tensors: Tensors, axis: Axis) -> Tensors:
    """[n, ...] of every rank -> [N n, ...], of each tensor."""
    return tuple(all_gather(tensor, axis) for tensor in tensors)


def _sum(tensors: Tensors, axis: Axis) -> Tensors:
    """[N n, ...] summands -> [n, ...]: the sum of this rank's part, in the accumulate dtype."""
    return tuple(reduce_scatter(tensor.to(wide(tensor.dtype)), axis) for tensor in tensors)
