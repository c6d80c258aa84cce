"""Which layouts `fivefold bench scaling` takes from one rank to many, and what the simulator says of them."""

from fivefold.cluster import Cluster, Group
from fivefold.layout import Layout
from fivefold.plan.stack import FIVEFOLD
from fivefold.plan.time import Case, estimate
from fivefold.train.config import Job


def layouts(job: Job, most: int) -> list[str]:
    """Powers of two of each axis alone, then of three at once, as far as the model and the batch allow."""
    sizes = [size for exponent in range(1, most.bit_length()) if (size := 2**exponent) <= most]
    found = [f"{axis}={size}" for axis in ("dp", "tp", "pp", "cp") for size in sizes]
    found += [f"dp={size // 4},tp=2,pp=2" for size in sizes if size >= 8]
    found += [f"dp=2,tp=2,pp={size // 4}" for size in sizes if size >= 16]
    return [text for text in found if not _problems(job, text)]


def _problems(job: Job, text: str) -> list[str]:
    layout = Layout.parse(text)
    full = Layout.parse(f"{text},microbatches={max(1, job.layout.microbatches // layout.dp)}")
    return full.problems(job.model, seq=job.data.seq, batch=job.train.batch)


def predicted(job: Job, chosen: list[str], accelerator: str) -> dict[str, float]:
    """Speed-ups over one process, on that many of the accelerator in one machine."""
    device = Cluster.parse(accelerator).groups[0].accelerator
    stack = FIVEFOLD.computing_in("fp32")

    def seconds(layout: Layout) -> float:
        cluster = Cluster((Group(1, layout.world, device),))
        return estimate(Case(job.model, layout, cluster, job.data.seq, job.train.batch, "fp32", stack)).seconds

    alone = seconds(Layout(microbatches=job.layout.microbatches))
    found = {}
    for text in chosen:
        layout = Layout.parse(text)
        full = Layout.parse(f"{text},microbatches={max(1, job.layout.microbatches // layout.dp)}")
        found[text] = alone / seconds(full)
    return found
