"""Tokens to their experts by all-to-all: how many first, then the tokens, and back.

Per layer and microbatch, with n tokens on this rank, K slots each, N rows for this rank's experts, X experts in all:

    forward     X int64 counts; n K rows of E elements out and N in; N out and n K in
    backward    the two of rows again, the other way around

A row is sent once for each slot, to whichever rank has the expert. Full recompute sends forward's again; selective
recompute keeps what came. A rank without tokens, or whose experts got none, takes part like any other.
While tokens are on their way to experts the shared one computes; and before each wait for rows, forward and backward,
the other half of a joined pair may run.
"""

import torch
from torch import Tensor

from fivefold.model.experts.dispatch import COMBINE, DISPATCH, Beside, Compute, FromSlots, Rearrange, ToSlots, places
from fivefold.model.experts.grouped import Groups
from fivefold.model.experts.router import Routed
from fivefold.model.recompute import kept
from fivefold.parallel.collectives import all_to_all, wait
from fivefold.parallel.experts.slices import SlicedDispatch
from fivefold.parallel.experts.trips import Arrive, SendOff, Tensors, Trip
from fivefold.parallel.mesh import Axis


class AllToAllDispatch(SlicedDispatch):
    travels = True
    reads_rows = False  # but where they have come back

    def run(
        self, x: Tensor, routed: Routed, compute: Compute, stream: int, beside: Beside = None
    ) -> tuple[Tensor, Tensor | None]:
        with self.sending(DISPATCH):
            order, counts, going = routed.order, routed.counts, self.going
            of_slot = places(order)
            (coming,) = kept(lambda: (wait(all_to_all(counts, going), going),), 1, counts)
            sent, due = self.host.by_rank(counts, coming, self.ep.size, len(order))
            out, back = [sum(rank) for rank in sent], [sum(rank) for rank in due]
            there = self._trip(DISPATCH, out, back)
            ticket = SendOff.apply(there, ToSlots.apply(x, order, of_slot))
            # They will lie rank by rank, and the experts want them expert by expert.
            by_expert = _experts_of(coming, self.ep.size, sum(back)).sort(dim=0, stable=True).indices
            ends = (
                coming.unflatten(0, (self.ep.size, -1)).sum(0).cumsum(0).int()
            )  # there, so that the host need not wait
            of_row, groups = places(by_expert), Groups(ends, tuple(map(sum, zip(*due, strict=True))))
        shared = beside() if beside is not None else None
        there.pause()
        with self.sending(DISPATCH):
            # One name for what moves on: what a name held before is let go of, and rows are large.
            (rows,) = Arrive.apply(there, 1, ticket)
            rows = Rearrange.apply(rows, by_expert, of_row)
        rows = compute(rows, groups)
        with self.sending(COMBINE):
            rows = Rearrange.apply(rows, of_row, by_expert)
            home = self._trip(COMBINE, back, out)
            ticket = SendOff.apply(home, rows)
            del rows
        home.pause()
        with self.sending(COMBINE):
            (rows,) = Arrive.apply(home, 1, ticket)
            return FromSlots.apply(rows, routed.weights, order, of_slot), shared

    def _trip(self, what: str, out: list[int], back: list[int]) -> Trip:
        """Of rows [sum of `out`, E] -> [sum of `back`, E]: so many to each rank, and so many from each."""

        def there(rows: Tensors, axis: Axis) -> Tensors:
            return (all_to_all(rows[0], axis, out, back),)

        def home(gradients: Tensors, axis: Axis) -> Tensors:
            return (all_to_all(gradients[0], axis, back, out),)

        return Trip(self, what, there, home)


def _experts_of(coming: Tensor, ranks: int, rows: int) -> Tensor:
    """Which of this rank's experts each row is for; `coming` [ranks * experts here] are the numbers of these rows."""
    experts = torch.arange(len(coming) // ranks, device=coming.device).repeat(ranks)
    return experts.repeat_interleave(coming, output_size=rows)
