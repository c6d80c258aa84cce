"""The names of a run, by which a restart finds its directory, and the list of names that each directory keeps.

A launcher (our own, torchrun, Slurm) gives a run a name that stays the same for all its starts; a start by hand has
none. Besides, each job has a name, made from its settings, whoever launches it.
"""

import hashlib
import json
import os
from collections.abc import Mapping

import msgspec

from fivefold.checkpoint.storage import storage_of
from fivefold.job.config import Job
from fivefold.launch.world import PLANNED_ENV, REQUEUES_ENV, RESTARTS_ENV, RUN_ID_ENV
from fivefold.support.errors import UserError
from fivefold.support.files import cannot_write
from fivefold.support.storage_place import Place, RemotePlace
from fivefold.support.text import whole_number

RUN_NAMES_FILE = "runs.json"
_MAX_NAMES = 64  # the newest that a directory keeps
_MAX_BYTES = 1 << 20  # of the file


class _RunNamesFile(msgspec.Struct, frozen=True):
    runs: list[str]  # names of the runs that have trained in the directory, the newest last
    seal: str  # a digest of `runs`: a damaged name could be the name of another run

    @classmethod
    def of(cls, names: list[str]) -> "_RunNamesFile":
        return cls(names, hashlib.sha256(json.dumps(names).encode()).hexdigest())


def launcher_names(job: Job, env: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """{the name that a launcher gives this run: whether that launcher has restarted it}; empty for a start by hand.

    A name includes a digest of the job: one Slurm job may run several commands, and torchrun calls every run "none"
    that --rdzv-id does not name. torchrun does not count a start with other members as a restart, so an elastic run
    always counts as restarted.
    """
    digest = _job_digest(job)
    elastic = PLANNED_ENV in env and env.get(RUN_ID_ENV) != "none"
    names = {}
    if RUN_ID_ENV in env:
        names[f"torchrun {env[RUN_ID_ENV]} {digest}"] = elastic or _is_counted(env, RESTARTS_ENV)
    if "SLURM_JOB_ID" in env:
        cluster, step = env.get("SLURM_CLUSTER_NAME", ""), env.get("SLURM_STEP_ID", "batch")
        names[f"slurm {cluster} {env['SLURM_JOB_ID']}.{step} {digest}"] = elastic or _is_counted(env, REQUEUES_ENV)
    return names


def _is_counted(env: Mapping[str, str], variable: str) -> bool:
    """Whether a launcher's count of restarts is over 0."""
    return bool(whole_number(env.get(variable, "0")))


def job_name(job: Job) -> str:
    """The name that a run has by its job, whoever launches it."""
    return f"job {_job_digest(job)}"


def _job_digest(job: Job) -> str:
    """A digest of settings that are not defaults, so that a release with one more setting has the same digests."""
    settings = {key: _changed_settings(getattr(job, key)) for key in ("model", "data", "optimizer", "train", "run")}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _changed_settings(section: msgspec.Struct) -> dict[str, object]:
    """The settings of a section of the job that are not defaults."""
    fields = msgspec.structs.fields(section)
    unchanged = {field.encode_name for field in fields if getattr(section, field.name) == field.default}
    return {key: value for key, value in msgspec.to_builtins(section).items() if key not in unchanged}


def read_run_names(place: Place) -> list[str] | None:
    """The names of the runs that have trained there; [] if there is no list, and None if it is damaged."""
    try:
        stored = msgspec.json.decode(storage_of(place).read(place / RUN_NAMES_FILE, _MAX_BYTES), type=_RunNamesFile)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, OSError) and isinstance(place, RemotePlace):  # no damage: the server does not answer
            raise UserError(f"cannot read {place / RUN_NAMES_FILE}: {error.strerror}", "file.read") from None
        return None
    return stored.runs if stored == _RunNamesFile.of(stored.runs) else None


def write_run_names(place: Place, names: list[str]) -> None:
    """Writes the list, the newest name last; of equal names the last one is kept, and no more than `_MAX_NAMES`."""
    newest = list(dict.fromkeys(reversed(names)))[:_MAX_NAMES][::-1]
    try:
        storage_of(place).put(place / RUN_NAMES_FILE, msgspec.json.encode(_RunNamesFile.of(newest)) + b"\n")
    except OSError as error:
        if isinstance(place, RemotePlace):
            raise UserError(f"cannot write {place / RUN_NAMES_FILE}: {error.strerror}", "file.write") from None
        raise cannot_write(place / RUN_NAMES_FILE, error) from None
