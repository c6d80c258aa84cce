"""The watcher of slow ranks in a trainer: what the ranks tell each other, and when.

The times travel with the all-reduce of the gradient norm, in steps that are looked at: each rank fills its row of a
table of zeros, and the sum is the table. No rank waits for another because of it.
"""

from collections.abc import Callable

import torch

from fivefold.job.config import Job
from fivefold.parallel.mesh import Mesh
from fivefold.train.watch.phases import PHASES, Phases
from fivefold.train.watch.slow import SlowRanks


class SlowWatch:
    def __init__(self, job: Job, mesh: Mesh, phases: Phases):
        self.mesh, self.phases = mesh, phases
        self.every = job.watch.slow_every if job.watch.slow and mesh.world.size > 1 else 0
        ranks, layout = range(mesh.world.size if mesh.world.rank == 0 else 0), job.layout
        stages = [layout.position("pp", rank) for rank in ranks]
        self.judge = SlowRanks(job.watch.slow, stages, [layout.place(rank) for rank in ranks], PHASES)

    def table(self, step: int) -> torch.Tensor | None:
        """This rank's row of the steps before, in steps that are looked at."""
        if not self.every or step % self.every:
            if len(self.phases.kept) > 1 << 10:  # nobody asks
                self.phases.told()
            return None
        table = torch.zeros(self.mesh.world.size, len(PHASES) + 1, dtype=torch.float64)
        table[self.mesh.world.rank] = torch.tensor(self.phases.told(), dtype=torch.float64)
        return table.to(self.mesh.device)

    def look(self, step: int, table: torch.Tensor | None, say: Callable[[str], None]) -> None:
        """Rank 0 says what has changed."""
        if table is not None and self.mesh.world.rank == 0:
            for sentence in self.judge.look(step, table.tolist()):
                say(sentence)
