"""The directory of a run: NAME, NAME-2, NAME-3 ... below run.dir; which runs have trained in it, and which does now.

A launcher that restarts a run (our own, torchrun, a requeued Slurm job) uses the same command line. Such a restart
continues in the directory that lists the run, and in no other, even if --fresh made it or another run of the same name
came later. A start by hand takes the newest directory that has a checkpoint; if that is of another job, the newest one
that has trained this very job.

With checkpoint.url, the checkpoints and the list of runs are there, so that they outlive the machine. The directory may
then be another one on every machine, and new with every start.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from fivefold.checkpoint.manifest import Checkpoint
from fivefold.checkpoint.memory_snapshots import local_snapshots
from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import Store
from fivefold.job.config import Job
from fivefold.launch.world import PLANNED_ENV, REQUEUES_ENV, RESTARTS_ENV, RUN_ID_ENV
from fivefold.support.errors import UserError
from fivefold.support.files import Regular, cannot_write, open_regular
from fivefold.support.parsing import path_of, read_toml
from fivefold.support.storage_place import Place, RemotePlace, remote_of
from fivefold.support.text import whole_number

JOB_FILE = "job.toml"
OWNERS_FILE = "runs.json"
_MAX_OWNERS = 64  # the last runs that a directory lists
_CLAIMS: list[Regular] = []  # locked files, open until this process ends


class Owners(msgspec.Struct, frozen=True):
    """The runs that have trained in a directory, the last one last."""

    runs: list[str]
    seal: str  # their sha256: a damaged name could be another run's

    @classmethod
    def of(cls, runs: list[str]) -> "Owners":
        return cls(runs, hashlib.sha256(json.dumps(runs).encode()).hexdigest())


def identities(job: Job, env: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """{the name that a launcher gives this run: whether that launcher restarts it}.

    A name includes a digest of the job: one Slurm job may run several commands, and torchrun calls every run "none"
    that --rdzv-id does not name. torchrun does not count a start with other members as a restart, so an elastic run
    always counts as restarted.
    """
    digest = _job_digest(job)
    step = f"{env.get('SLURM_CLUSTER_NAME', '')} {env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID', 'batch')}"
    names = {f"torchrun {env.get(RUN_ID_ENV)}": RESTARTS_ENV} if RUN_ID_ENV in env else {}
    names |= {f"slurm {step}": REQUEUES_ENV} if "SLURM_JOB_ID" in env else {}
    elastic = PLANNED_ENV in env and env.get(RUN_ID_ENV) != "none"
    return {f"{name} {digest}": elastic or bool(whole_number(env.get(count, "0"))) for name, count in names.items()}


def _job_digest(job: Job) -> str:
    """A digest of settings that are not defaults, so that a release with one more setting has the same digests."""
    settings = {key: _changed_settings(getattr(job, key)) for key in ("model", "data", "optimizer", "train", "run")}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _changed_settings(section: msgspec.Struct) -> dict[str, object]:
    """The settings of a section of the job that are not defaults."""
    fields = msgspec.structs.fields(section)
    unchanged = {field.encode_name for field in fields if getattr(section, field.name) == field.default}
    return {key: value for key, value in msgspec.to_builtins(section).items() if key not in unchanged}


def run_directory(job: Job, *, fresh: bool, env: Mapping[str, str] = os.environ) -> Path:
    """The directory that this run trains in, with this run on its list."""
    return enter_directory(job, existing_run_directory(job, fresh=fresh, env=env), env)


def existing_run_directory(job: Job, *, fresh: bool, env: Mapping[str, str] = os.environ) -> Path | None:
    """The directory of a restarted run; otherwise the newest of its name, if that has checkpoints and not `fresh`.

    None: a new one is to be made. What an earlier run left is never deleted. A restarted run that no directory lists
    has ended before it had one: it takes the newest of the same job only.
    """
    directories = _existing(job)
    restarted = [name for name, restarts in identities(job, env).items() if restarts]
    if restarted:
        runs_by_directory = {directory: owners(home(job, directory)) for directory in reversed(directories)}
        for directory, runs in runs_by_directory.items():
            if runs and set(runs) & set(restarted):
                return directory
        damaged = [
            str(home(job, directory) / OWNERS_FILE) for directory, runs in runs_by_directory.items() if runs is None
        ]
        if damaged:
            raise UserError(
                f"this run is started again, and which directory is its own cannot be told: {', '.join(damaged)} "
                "cannot be read; start it by hand, with another run.name or --fresh, or delete that file",
                "run.start.unknown",
            )
    candidates = [directory for directory in directories if not restarted or _has_trained(job, directory)]
    return candidates[-1] if candidates and not fresh and complete(job, candidates[-1]) else None


def earlier(job: Job, refused: Path, env: Mapping[str, str] = os.environ) -> Path | None:
    """The newest directory but `refused` that has trained this very job and has a checkpoint, for a start by hand.

    None for a restarted run: it has its own directory, and takes no other.
    """
    if any(identities(job, env).values()):
        return None
    others = [directory for directory in reversed(_existing(job)) if directory != refused]
    return next((directory for directory in others if _has_trained(job, directory) and complete(job, directory)), None)


def _has_trained(job: Job, directory: Path) -> bool:
    """Whether this very job has trained there, whoever launched it."""
    return _job_name(job) in (owners(home(job, directory)) or [])


def enter_directory(job: Job, directory: Path | None, env: Mapping[str, str] = os.environ) -> Path:
    """The directory, or a new one if None, after adding this run to its list."""
    names = [*identities(job, env), _job_name(job)]
    if directory is None:
        return _new(job, len(_existing(job)) + 1, names)
    with suppress(OSError):  # with checkpoint.url, this machine may see it for the first time
        directory.mkdir(parents=True, exist_ok=True)
    sign(home(job, directory), [*(owners(home(job, directory)) or []), *names])
    return directory


def has_trained(job: Job, directory: Path, env: Mapping[str, str] = os.environ) -> bool:
    """Whether this run has trained there before, by a name that a launcher gave it."""
    return bool(set(owners(home(job, directory)) or []) & set(identities(job, env)))


def _job_name(job: Job) -> str:
    """The name by which a directory lists a job, whoever launches it."""
    return f"job {_job_digest(job)}"


def home(job: Job, directory: Path) -> Place:
    """Where checkpoints and the list of runs are: the run's directory, or its name below checkpoint.url."""
    return remote_of(job.checkpoint.url) / directory.name if job.checkpoint.url else directory


def store(job: Job, directory: Path) -> Store:
    """The checkpoints of a run."""
    return Store(home(job, directory) / "checkpoints")


def complete(job: Job, directory: Path) -> list[Checkpoint]:
    """The checkpoints to resume from, newest first.

    Raises UserError where there are none, but some at a place that the job had named before.
    """
    try:
        on_disk = store(job, directory).complete()
    except OSError as error:
        raise UserError(f"cannot look at {home(job, directory)}: {error.strerror}", "file.read") from None
    snapshots = local_snapshots(home(job, directory))  # of this machine: there may be some before the first on disk
    if on_disk or snapshots:
        return sorted([*snapshots, *on_disk], key=lambda checkpoint: checkpoint.step, reverse=True)
    if job.checkpoint.url and (local := Store(directory / "checkpoints")).complete():
        raise UserError(
            f"{local.directory} has checkpoints, and {home(job, directory)} has none; 'fivefold checkpoint reshard "
            f"{directory} --layout {job.layout} -o {home(job, directory)}' brings the newest there, and another "
            "run.name starts a run of its own",
            "run.moved",
        )
    if problem := _moved_checkpoints(job, directory):
        raise UserError(problem, "run.moved")
    return []


def _moved_checkpoints(job: Job, directory: Path) -> str:
    """A sentence, if the directory's stored job has its checkpoints at another URL; else an empty text."""
    url = ""
    with suppress(UserError, KeyError, TypeError):
        url = str(read_toml(directory / JOB_FILE)["checkpoint"]["url"])
    if url in ("", job.checkpoint.url):
        return ""
    stored = remote_of(url) / directory.name
    try:
        state = "has them" if Store(stored / "checkpoints").complete() else ""
    except OSError as error:
        state = f"cannot be accessed: {error.strerror}"
    if not state:
        return ""
    return (
        f"{home(job, directory)} has no checkpoints, and {stored} {state}; the run continues "
        f"with checkpoint.url={url}, 'fivefold checkpoint reshard {stored} --layout {job.layout} -o NEW' makes a run "
        "elsewhere of the newest, and another run.name or --fresh starts one of its own"
    )


def claim(directory: Path) -> None:
    """Locks the directory, in which one process at a time trains. The lock ends with the process, however it ends."""
    try:
        _CLAIMS.append(open_regular(directory / "claim", append=True))
    except OSError as error:
        raise cannot_write(directory / "claim", error) from None
    try:
        fcntl.flock(_CLAIMS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process is training in {directory}; --fresh starts a run of its own, and so does another "
            "run.name",
            "run.taken",
        ) from None
    except OSError:  # a file system without locks
        pass


def owners(place: Place) -> list[str] | None:
    """The runs that have trained there; [] if there is no list, and None if it is damaged."""
    try:
        stored = msgspec.json.decode(storage_of(place).read(place / OWNERS_FILE, 1 << 20), type=Owners)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, OSError) and isinstance(place, RemotePlace):  # no damage: the server does not answer
            raise UserError(f"cannot read {place / OWNERS_FILE}: {error.strerror}", "file.read") from None
        return None
    return stored.runs if stored == Owners.of(stored.runs) else None


def sign(place: Place, runs: list[str]) -> None:
    """Writes the list of runs that train there."""
    last_runs = list(dict.fromkeys(reversed(runs)))[:_MAX_OWNERS][::-1]
    try:
        storage_of(place).put(place / OWNERS_FILE, msgspec.json.encode(Owners.of(last_runs)) + b"\n")
    except OSError as error:
        if isinstance(place, RemotePlace):
            raise UserError(f"cannot write {place / OWNERS_FILE}: {error.strerror}", "file.write") from None
        raise cannot_write(place / OWNERS_FILE, error) from None


def _existing(job: Job) -> list[Path]:
    """The directories of the run's name that exist, here or at checkpoint.url, the oldest first."""
    parent, remote_names = path_of(job.run.dir), set[str]()
    if job.checkpoint.url:
        url = remote_of(job.checkpoint.url)
        try:
            remote_names = {folder.name for folder in storage_of(url).folders(url)}
        except OSError as error:
            raise UserError(f"cannot look at checkpoint.url={url}: {error.strerror}", "checkpoint.url.reach") from None
    directories: list[Path] = []
    while (name := _numbered(job.run.name, len(directories) + 1)) in remote_names or (parent / name).exists():
        directories.append(parent / name)
    return directories


def _numbered(name: str, number: int) -> str:
    return name if number < 2 else f"{name}-{number}"


def _new(job: Job, number: int, runs: list[str]) -> Path:
    """Makes the directory of the first free number from `number`."""
    while True:
        directory = path_of(job.run.dir) / _numbered(job.run.name, number)
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise UserError(f"cannot make the run's directory {directory}: {error.strerror}", "run.dir.write") from None
        try:
            sign(home(job, directory), runs)
        except UserError:
            with suppress(OSError):
                directory.rmdir()
            raise
        return directory
