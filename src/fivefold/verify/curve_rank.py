"""One rank of a run whose loss curve is wanted, and nothing else of it."""

from dataclasses import fields

import numpy as np

from fivefold.data.batch import Batch
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.launch.device import choose_device, make_repeatable
from fivefold.launch.ranks import Rank
from fivefold.parallel.gather_full import digest, whole
from fivefold.parallel.mesh import Mesh, backend
from fivefold.train.engine import Engine
from fivefold.train.loop import Trainer


def run(rank: Rank, job: Job, shuffled: bool) -> tuple[list[float], dict[str, str]]:
    """The loss of every step, and a digest of each weight it started from."""
    device = choose_device(job.train.device, rank.number)
    make_repeatable(job.train)
    if rank.world > 1:
        rank.join(backend(device, rank.world))
    trainer = Trainer(job, preflight(job, rank.world), Mesh.of(job.layout, device))
    start = digests(trainer.engine)
    losses = []
    for step, read in enumerate(trainer.reads(), start=1):
        batch = read()
        losses.append(trainer.step(step, shuffle(batch, step) if shuffled else batch).loss)
    return losses, start


def shuffle(batch: Batch, seed: int) -> Batch:
    """The same samples in another order, and so in other microbatches."""
    order = np.random.default_rng(seed).permutation(len(batch.samples))
    return Batch(**{field.name: getattr(batch, field.name)[order] for field in fields(batch)})


def digests(engine: Engine) -> dict[str, str]:
    """Of each weight of this rank's stages, whole. Every rank must ask: gathering them is a collective."""
    weights = sorted(engine.parameters().items())
    return {name: digest(whole(weight)) for name, weight in weights}
