"""A few steps of a job on ranks of this machine, traced."""

import msgspec

from fivefold.job.config import Job
from fivefold.launch import ranks
from fivefold.trace.records import Trace

STEPS = 3


def short(job: Job) -> Job:
    """The job cut down to its warm-up and the traced steps, with nothing held out."""
    replace = msgspec.structs.replace
    trace = replace(job.trace, steps=job.trace.steps or STEPS)
    train = replace(job.train, steps=max(0, trace.after) + max(1, trace.steps), eval_samples=0)
    return replace(job, train=train, trace=trace)


def trace(job: Job, timeout: float) -> Trace:
    found = ranks.run(job.layout.world, "fivefold.train.traced_rank:run", job, timeout=timeout)[0]
    assert isinstance(found, Trace)
    return found
