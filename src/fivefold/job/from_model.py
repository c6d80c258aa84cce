"""A job for commands that ask about a model: they take its name, a Hugging Face config or a whole job file."""

from collections.abc import Sequence
from pathlib import Path

from fivefold.job.config import Job, read_job
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError


def job_of(model: str | Path | ModelSpec | Job, changes: Sequence[str] = ()) -> tuple[Job, set[str]]:
    """The job, and the keys that were given. A job file gives its batch and its sequence length.

    `model` is a preset's name, a config.json or its directory, a job file, or an object; `changes` are KEY=VALUE.
    """
    strange = [change for change in changes if "=" not in change]
    if strange:
        raise UserError(f"{strange[0]!r} is not a change; write KEY=VALUE, for example model.layers=40")
    named = {change.partition("=")[0] for change in changes}
    whole = named | {"data.seq", "train.batch"}
    if isinstance(model, (ModelSpec, Job)):
        if changes:
            raise UserError(f"{changes[0]!r} changes a model that is given by name; change the object instead")
        return (Job(model=model), named) if isinstance(model, ModelSpec) else (model, whole)
    name = str(model)
    if "=" in name:
        raise UserError(f"{name!r} is a change, and the model comes first; for example llama3-8b {name}")
    if name.endswith(".toml"):
        return read_job(name, list(changes)), whole
    path = Path(name).expanduser()
    kind = "model.config" if path.exists() or name.endswith(".json") else "model"
    return read_job(None, [f"{kind}={name}", *changes]), named
