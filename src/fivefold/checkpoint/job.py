"""The job that a checkpoint was made by, for whoever goes on from it otherwise."""

from pathlib import Path

import msgspec

from fivefold.checkpoint.store import Checkpoint
from fivefold.job.config import Job, job_from
from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError


def job_of(checkpoint: Checkpoint, layout: Layout | None = None, run: Path | None = None) -> Job:
    """With another `layout`, and as the job of the run directory `run`, where given."""
    try:
        job = job_from(checkpoint.manifest.job)
    except msgspec.ValidationError as error:
        raise UserError(f"the job in {checkpoint.path} cannot be read by this release: {error}") from None
    replace = msgspec.structs.replace
    if layout is not None:
        job = replace(job, layout=layout)
    if run is not None:
        job = replace(job, run=replace(job.run, name=run.name, dir=str(run.absolute().parent)))
    return job
