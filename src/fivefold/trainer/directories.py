"""The directory of a run: NAME, NAME-2, NAME-3 ... below run.dir; which runs have trained in it, and who does now.

A launcher that starts a run again (our own, torchrun, a requeued Slurm job) does so with the same words. Such a start
goes on in the directory that knows the run, and in no other, also where --fresh made it and where another run of the
same name came later. A command by hand takes the newest that has a checkpoint; if that refuses its job, the one that
has trained this very job.

With checkpoint.url, what outlives a machine lies there: the checkpoints, and which runs have trained. The directory may
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

from fivefold.checkpoint.memory import in_memory
from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import Checkpoint, Store
from fivefold.job.config import Job
from fivefold.launch.world import PLANNED, REQUEUES, RESTARTS, RUN
from fivefold.support.errors import UserError
from fivefold.support.files import Regular, cannot_write, open_regular
from fivefold.support.parsing import path_of, read_toml
from fivefold.support.places import Place, RemotePlace, remote_of
from fivefold.support.text import whole_number

JOB = "job.toml"
OWNERS = "runs.json"
_MOST = 64  # runs that a directory remembers: the last ones
_CLAIMS: list[Regular] = []  # open as long as this process lives


class Owners(msgspec.Struct, frozen=True):
    """The runs that have trained in a directory, the last one last."""

    runs: list[str]
    seal: str  # sha256 of them: a damaged name would be that of another run

    @classmethod
    def of(cls, runs: list[str]) -> "Owners":
        return cls(runs, hashlib.sha256(json.dumps(runs).encode()).hexdigest())


def identities(job: Job, env: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """What this run is called by each of its launchers, and whether that one has started it before.

    A name has the job in it, without what does not change its numbers: one Slurm job may run several commands, and
    torchrun calls every run "none" that --rdzv-id does not name. torchrun does not count a start for other members as
    one, so an elastic run is one that has started before wherever its name is known.
    """
    short = _digest(job)
    step = f"{env.get('SLURM_CLUSTER_NAME', '')} {env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID', 'batch')}"
    names = {f"torchrun {env.get(RUN)}": RESTARTS} if RUN in env else {}
    names |= {f"slurm {step}": REQUEUES} if "SLURM_JOB_ID" in env else {}
    elastic = PLANNED in env and env.get(RUN) != "none"
    return {f"{name} {short}": elastic or bool(whole_number(env.get(count, "0"))) for name, count in names.items()}


def _digest(job: Job) -> str:
    """Of what differs from defaults: a release with one more setting knows the runs of the one before."""
    what = {key: _given(getattr(job, key)) for key in ("model", "data", "optimizer", "train", "run")}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _given(section: msgspec.Struct) -> dict[str, object]:
    fields = msgspec.structs.fields(section)
    usual = {field.encode_name for field in fields if getattr(section, field.name) == field.default}
    return {key: value for key, value in msgspec.to_builtins(section).items() if key not in usual}


def run_directory(job: Job, fresh: bool, env: Mapping[str, str] = os.environ) -> Path:
    """That of this run, signed."""
    return entered(job, chosen(job, fresh, env), env)


def chosen(job: Job, fresh: bool, env: Mapping[str, str] = os.environ) -> Path | None:
    """That of this run, if it is started again; else the newest of its name, if that has checkpoints to resume from and
    a `fresh` one is not asked for; else none: a new one is to be made. What an earlier run left is never deleted.

    A run that is started again and that no directory knows has ended before it had one: it takes the newest of the same
    job only, not that of another."""
    names, directories = identities(job, env), _existing(job)
    again = [run for run, before in names.items() if before]
    if again:
        known = {directory: owners(home(job, directory)) for directory in reversed(directories)}
        for directory, runs in known.items():
            if runs and set(runs) & set(again):
                return directory
        if damaged := [str(home(job, directory) / OWNERS) for directory, runs in known.items() if runs is None]:
            raise UserError(
                f"this run is started again, and which directory is its own cannot be told: {', '.join(damaged)} "
                "cannot be read; start it by hand, with another run.name or --fresh, or delete that file"
            )
    candidates = [directory for directory in directories if not again or _has_trained(job, directory)]
    return candidates[-1] if candidates and not fresh and complete(job, candidates[-1]) else None


def earlier(job: Job, refused: Path, env: Mapping[str, str] = os.environ) -> Path | None:
    """Where a command by hand goes on if the newest of its name refuses it: the next newest that has trained this very
    job and has a checkpoint. A run that is started again has its own directory, and takes no other."""
    if any(identities(job, env).values()):
        return None
    others = [directory for directory in reversed(_existing(job)) if directory != refused]
    return next((directory for directory in others if _has_trained(job, directory) and complete(job, directory)), None)


def _has_trained(job: Job, directory: Path) -> bool:
    """This very job, whoever launched it."""
    return _same(job) in (owners(home(job, directory)) or [])


def entered(job: Job, directory: Path | None, env: Mapping[str, str] = os.environ) -> Path:
    """The directory, or a new one, with this run among those that have trained in it."""
    names = [*identities(job, env), _same(job)]
    if directory is None:
        return _new(job, len(_existing(job)) + 1, names)
    with suppress(OSError):  # with checkpoint.url, this machine may see it for the first time
        directory.mkdir(parents=True, exist_ok=True)
    sign(home(job, directory), [*(owners(home(job, directory)) or []), *names])
    return directory


def trained(job: Job, directory: Path, env: Mapping[str, str] = os.environ) -> bool:
    """Whether this run has trained there before, by a name that a launcher gave it."""
    return bool(set(owners(home(job, directory)) or []) & set(identities(job, env)))


def _same(job: Job) -> str:
    """The name of a run that no launcher names."""
    return f"job {_digest(job)}"


def home(job: Job, directory: Path) -> Place:
    """Where what outlives a machine lies: the run's directory, or its namesake below checkpoint.url."""
    return remote_of(job.checkpoint.url) / directory.name if job.checkpoint.url else directory


def store(job: Job, directory: Path) -> Store:
    """The checkpoints of a run."""
    return Store(home(job, directory) / "checkpoints")


def complete(job: Job, directory: Path) -> list[Checkpoint]:
    """Checkpoints to resume from. A run does not leave those that it has for a place without any."""
    try:
        on_disk = store(job, directory).complete()
    except OSError as error:
        raise UserError(f"cannot look at {home(job, directory)}: {error.strerror}") from None
    kept = in_memory(home(job, directory))  # of this machine: a run may have been lost before its first on disk
    if on_disk or kept:
        return sorted([*kept, *on_disk], key=lambda checkpoint: checkpoint.step, reverse=True)
    if job.checkpoint.url and (here := Store(directory / "checkpoints")).complete():
        raise UserError(
            f"{here.directory} has checkpoints, and {home(job, directory)} has none; 'fivefold checkpoint reshard "
            f"{directory} --layout {job.layout} -o {home(job, directory)}' brings the newest there, and another "
            "run.name starts a run of its own"
        )
    if elsewhere := _at_first(job, directory):
        raise UserError(elsewhere)
    return []


def _at_first(job: Job, directory: Path) -> str:
    """Of a run whose own job has its checkpoints at another URL, a sentence; else none."""
    url = ""
    with suppress(UserError, KeyError, TypeError):
        url = str(read_toml(directory / JOB)["checkpoint"]["url"])
    if url in ("", job.checkpoint.url):
        return ""
    there = remote_of(url) / directory.name
    try:
        state = "has them" if Store(there / "checkpoints").complete() else ""
    except OSError as error:
        state = f"cannot be accessed: {error.strerror}"
    return state and (
        f"{home(job, directory)} has no checkpoints, and {there} {state}; the run continues with checkpoint.url={url}, "
        f"'fivefold checkpoint reshard {there} --layout {job.layout} -o NEW' makes a run elsewhere of the newest, and "
        "another run.name or --fresh starts one of its own"
    )


def claim(directory: Path) -> None:
    """One process at a time trains in a directory. The claim ends with the process, however that ends."""
    try:
        _CLAIMS.append(open_regular(directory / "claim", append=True))
    except OSError as error:
        raise cannot_write(directory / "claim", error) from None
    try:
        fcntl.flock(_CLAIMS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process is training in {directory}; --fresh starts a run of its own, and so does another run.name"
        ) from None
    except OSError:  # a file system without locks
        pass


def owners(place: Place) -> list[str] | None:
    """The runs that have trained there; none if nobody wrote them down, and None if what was written is damaged."""
    try:
        stored = msgspec.json.decode(storage_of(place).read(place / OWNERS, 1 << 20), type=Owners)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, OSError) and isinstance(
            place, RemotePlace
        ):  # a server that does not answer damages nothing
            raise UserError(f"cannot read {place / OWNERS}: {error.strerror}") from None
        return None
    return stored.runs if stored == Owners.of(stored.runs) else None


def sign(place: Place, runs: list[str]) -> None:
    """Write down which runs train there, or say why that cannot be."""
    last = list(dict.fromkeys(reversed(runs)))[:_MOST][::-1]
    try:
        storage_of(place).put(place / OWNERS, msgspec.json.encode(Owners.of(last)) + b"\n")
    except OSError as error:
        if isinstance(place, RemotePlace):
            raise UserError(f"cannot write {place / OWNERS}: {error.strerror}") from None
        raise cannot_write(place / OWNERS, error) from None


def _existing(job: Job) -> list[Path]:
    parent, there = path_of(job.run.dir), set[str]()
    if job.checkpoint.url:
        url = remote_of(job.checkpoint.url)
        try:
            there = {folder.name for folder in storage_of(url).folders(url)}
        except OSError as error:
            raise UserError(f"cannot look at checkpoint.url={url}: {error.strerror}") from None
    directories: list[Path] = []
    while (name := _numbered(job.run.name, len(directories) + 1)) in there or (parent / name).exists():
        directories.append(parent / name)
    return directories


def _numbered(name: str, number: int) -> str:
    return name if number < 2 else f"{name}-{number}"


def _new(job: Job, number: int, runs: list[str]) -> Path:
    while True:
        directory = path_of(job.run.dir) / _numbered(job.run.name, number)
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise UserError(f"cannot make the run's directory {directory}: {error.strerror}") from None
        try:
            sign(home(job, directory), runs)
        except UserError:
            with suppress(OSError):
                directory.rmdir()
            raise
        return directory
