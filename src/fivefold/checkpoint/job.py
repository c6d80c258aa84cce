"""The job that a checkpoint was made by, for whoever goes on from it otherwise."""

from pathlib import Path

import msgspec

from fivefold.checkpoint.store import Checkpoint
from fivefold.checkpoint.tensors import model_key
from fivefold.job.config import Job, job_from
from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError


def job_of(checkpoint: Checkpoint, layout: Layout | None = None, run: Path | None = None) -> Job:
    """With another `layout`, and as the job of the run directory `run`, where given. Its model is that of the tensors:
    whoever makes room for it makes no more than is there."""
    job = stored(checkpoint)
    if problems := job.model.problems() or _misfits(checkpoint, job.model):
        raise UserError(f"the job in {checkpoint.path}: {problem}" for problem in problems)
    replace = msgspec.structs.replace
    if layout is not None:
        job = replace(job, layout=layout)
    if run is not None:
        own = replace(job.checkpoint, url="")  # it has the checkpoint itself
        job = replace(job, run=replace(job.run, name=run.name, dir=str(run.absolute().parent)), checkpoint=own)
    return job


def stored(checkpoint: Checkpoint) -> Job:
    """As it was written."""
    try:
        return job_from(checkpoint.manifest.job)
    except (msgspec.ValidationError, ValueError, ArithmeticError) as error:
        raise UserError(f"the job in {checkpoint.path} cannot be read by this release: {error}") from None


def _misfits(checkpoint: Checkpoint, spec: ModelSpec) -> list[str]:
    tensors = checkpoint.tensors
    if spec.layers > len(tensors):
        return [f"model.layers={spec.layers}, and the checkpoint has {len(tensors)} tensors"]
    problems = []
    for parameter in spec.parameters():
        stored = tensors.get(model_key(parameter.name))
        if stored is None or stored.shape != parameter.shape:
            has = f"shape {list(stored.shape)}" if stored else "none"
            problems.append(f"{parameter.name} has shape {list(parameter.shape)}, and the checkpoint has {has}")
    return problems
