"""Where tokens go in a dry run: nobody computes it, so it is stated.

Every rank of ep sends the same number of rows. The rank that runs is the fullest of its ep group: it receives
`imbalance` times the mean, dealt evenly over the ranks that send and over its experts; the others share the rest.
"""

from dataclasses import dataclass

from torch import Tensor

from fivefold.model.experts.grouped import Groups
from fivefold.model.experts.host import Host


@dataclass(frozen=True)
class StatedRouting(Host):
    rank: int  # of ep
    ranks: int
    imbalance: float = 1.0  # what the fullest rank gets, over the mean

    def groups(self, ends: Tensor, slots: int) -> Groups:
        return Groups.of(tuple(dealt(slots, len(ends))), ends.device)

    def by_expert(self, counts: Tensor, slots: int) -> list[int]:
        return dealt(self.received(slots), len(counts))

    def by_rank(self, going: Tensor, coming: Tensor, ranks: int, slots: int) -> tuple[list[list[int]], list[list[int]]]:
        experts, received = len(going) // ranks, dealt(self.received(slots), ranks)
        rest = iter(dealt(slots - received[self.rank], ranks - 1))
        sent = [received[self.rank] if rank == self.rank else next(rest) for rank in range(ranks)]
        return [dealt(rows, experts) for rows in sent], [dealt(rows, experts) for rows in received]

    def received(self, slots: int) -> int:
        """Rows for the experts of this rank, of all that send."""
        return round(self.imbalance * slots) if self.ranks > 1 else slots


def dealt(rows: int, hands: int) -> list[int]:
    return [rows // hands + (hand < rows % hands) for hand in range(hands)]
