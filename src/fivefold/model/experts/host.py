"""How many rows go where, as the host must know them: to cut messages, and to make room for what comes.

The host waits for the device here, once for a dispatch. A dry run, whose tensors have no numbers, states them instead
(`dryrun/routing.py`).
"""

import torch
from torch import Tensor

from fivefold.launch.waits import stood
from fivefold.model.experts.grouped import Groups


class Host:
    def groups(self, ends: Tensor, slots: int) -> Groups:
        """Of `slots` rows that stay on this rank, where those of each expert end: only the device need know."""
        return Groups(ends)

    def by_expert(self, counts: Tensor, slots: int) -> list[int]:
        """Rows of each of this rank's experts; `slots` are those that this rank itself fills."""
        return stood(counts.tolist)

    def by_rank(self, going: Tensor, coming: Tensor, ranks: int, slots: int) -> tuple[list[list[int]], list[list[int]]]:
        """Rows that go to each rank and expert there, and those that come from each, for every expert here."""
        out, back = stood(torch.stack((going, coming)).unflatten(1, (ranks, -1)).tolist)  # both at once
        return out, back
