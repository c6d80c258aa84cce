"""Planning for serving: how to divide a model that only generates, how fast tokens come, and for how many at once.

    plan = serve("llama3-70b", "8xH100", prompt=1024, output=256)
    plan.latency.token             # seconds for a token, at its fastest
    plan.throughput.per_gpu        # tokens per second, at its most
    plan.explanation               # why, in sentences

options.py has the ways to do it, step.py their time, memory.py what they hold, sentences.py why, problems.py why not.
"""

from collections.abc import Sequence
from pathlib import Path

from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.job.from_model import job_of
from fivefold.plan.serving.options import Service, frontier, options, replicas
from fivefold.plan.serving.problems import no_room, problems, too_many
from fivefold.plan.serving.result import ServePlan
from fivefold.plan.serving.sentences import explain, missed
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError


def serve(
    model: str | Path | ModelSpec | Job,
    cluster: str | Path | Cluster = "8xH100",
    *,
    changes: Sequence[str] = (),
    prompt: int = 1024,
    output: int = 256,
    sequences: int | None = None,
    precision: str = "bf16",
    cache_bytes: int = 2,
    ttft: float | None = None,
    tpot: float | None = None,
    graphs: bool = True,
) -> ServePlan:
    """Plan serving. `ttft` and `tpot` are targets in seconds: to the first token, and for each one after it."""
    job, _ = job_of(model, changes)
    machines = Cluster.read(cluster)
    service = Service(
        job.model,
        machines.alike() or machines,
        prompt,
        output,
        sequences,
        precision,
        cache_bytes,
        ttft=ttft,
        tpot=tpot,
        graphs=graphs,
    )
    if found := problems(service):
        raise UserError(found)
    every = options(service)
    if not every:
        raise UserError(too_many(service) if next(replicas(service), None) else no_room(service))
    # tp stays inside the node, unless nothing fits so.
    inside = [option for option in every if not option.crosses] or every
    quick = min(inside, key=lambda one: (one.token, one.tp * one.pp))
    heavy = max(inside, key=lambda one: (one.tokens_per_second, -one.token))
    sentences, meeting = explain(service, quick, heavy), []
    if ttft is not None or tpot is not None:
        meeting = sorted((one for one in inside if one.meets(service)), key=lambda one: -one.tokens_per_second)
        if not meeting:
            sentences = (missed(service, inside), *sentences)
    across = min((one for one in every if one.crosses), key=lambda one: one.token, default=None)
    return ServePlan(service, quick, heavy, tuple(meeting), frontier(inside), across, tuple(every), sentences)
