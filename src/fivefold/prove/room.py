"""Whether a job's ranks fit into this machine's memory, before they are started."""

import os

from fivefold.layout import Layout
from fivefold.plan.memory import state
from fivefold.train.config import Job
from fivefold.words import bytes_text, si


def memory_problems(job: Job, ranks: int) -> list[str]:
    """Weights, gradients and optimizer of all ranks, and of the single process beside them, against what there is."""
    if job.train.device == "cuda":
        return []  # each rank looks at its own GPU when it starts
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    alone = state(job.model, Layout(), job.train.dtype).total
    needed = max(ranks * state(job.model, job.layout, job.train.dtype).total, alone)
    if needed <= have:
        return []
    return [
        f"{job.model.name} has {si(job.model.parameter_count)} parameters: on {ranks} ranks of this machine, or one, "
        f"weights, gradients and optimizer take {bytes_text(needed)} in {job.train.dtype}, and there are "
        f"{bytes_text(have)}; take a smaller model, or fewer layers"
    ]
