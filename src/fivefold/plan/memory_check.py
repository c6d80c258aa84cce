"""Whether what a job must hold fits into a memory: weights, gradients and optimizer of the ranks that share it."""

import os

import msgspec

from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.plan.cost.memory import state
from fivefold.support.formatting import bytes_text, si


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_problems(job: Job, ranks: int, have: int, where: str) -> list[str]:
    """Why `ranks` ranks do not fit into the `have` bytes that they share."""
    each = state(job.model, job.layout, job.train.dtype, job.optimizer).total
    if each * ranks <= have:
        return []
    on_it = f" on each of the {ranks} ranks that share it" if ranks > 1 else ""
    return [
        f"{job.model.name} has {si(job.model.parameter_count)} parameters: weights, gradients and optimizer take "
        f"{bytes_text(each)} in {job.train.dtype}{on_it}, and {where} has {bytes_text(have)}; take a smaller "
        f"model, or fewer layers: model.layers={max(1, job.model.layers * have // (each * ranks))} may fit"
    ]


def proof_problems(job: Job) -> list[str]:
    """The same for a job's ranks on this machine, and for the single process that they are held against."""
    if job.train.device == "cuda":
        return []  # each rank looks at its own GPU when it starts
    alone = msgspec.structs.replace(job, layout=Layout())
    here = host_memory(), "this machine"
    return memory_problems(job, job.layout.world, *here) or memory_problems(alone, 1, *here)
