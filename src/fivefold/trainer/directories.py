"""Which directory a run trains in: NAME, NAME-2, NAME-3 ... below run.dir; and where its checkpoints are.

A launcher that restarts a run (our own, torchrun, a requeued Slurm job) uses the same command line. Such a restart
continues in the directory that lists the run (`run_names.py`), and in no other, even if --fresh made it or another run
of the same name came later. A start by hand takes the newest directory that has a checkpoint; if that is of another
job, the newest one that has trained this very job.

With checkpoint.url, the checkpoints and the list of runs are there, so that they outlive the machine. The directory may
then be another one on every machine, and new with every start.
"""

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fivefold.checkpoint.manifest import Checkpoint
from fivefold.checkpoint.memory_snapshots import local_snapshots
from fivefold.checkpoint.storage import storage_of
from fivefold.checkpoint.store import Store
from fivefold.job.config import Job
from fivefold.support.errors import UserError
from fivefold.support.files import Regular, cannot_write, open_regular
from fivefold.support.parsing import path_of, read_toml
from fivefold.support.storage_place import Place, remote_of
from fivefold.trainer.run_names import RUN_NAMES_FILE, job_name, launcher_names, read_run_names, write_run_names

JOB_FILE = "job.toml"
_LOCKED_FILES: list[Regular] = []  # open until this process ends


def run_directory(job: Job, *, fresh: bool, env: Mapping[str, str] = os.environ) -> Path:
    """The directory that this run trains in, new or not, after adding the run to its list."""
    return enter_directory(job, existing_run_directory(job, fresh=fresh, env=env), env)


def existing_run_directory(job: Job, *, fresh: bool, env: Mapping[str, str] = os.environ) -> Path | None:
    """The directory in which this run continues; None if it needs a new one.

    A restarted run continues in its own. Any other continues in the newest directory of its name if that has
    checkpoints, unless `fresh`. A restarted run that no directory lists ended before it had one: it is treated as any
    other, but takes only a directory of the same job.
    """
    directories = _existing_directories(job)
    restarted = [name for name, is_restart in launcher_names(job, env).items() if is_restart]
    if restarted:
        names_by_directory = {directory: read_run_names(run_place(job, directory)) for directory in directories[::-1]}
        for directory, names in names_by_directory.items():
            if names and set(names) & set(restarted):
                return directory
        damaged = [directory for directory, names in names_by_directory.items() if names is None]
        if damaged:
            files = ", ".join(str(run_place(job, directory) / RUN_NAMES_FILE) for directory in damaged)
            raise UserError(
                f"this run is started again, and which directory is its own cannot be told: {files} "
                "cannot be read; start it by hand, with another run.name or --fresh, or delete that file",
                "run.start.unknown",
            )
    candidates = [directory for directory in directories if not restarted or _lists_job(job, directory)]
    return candidates[-1] if candidates and not fresh and resumable_checkpoints(job, candidates[-1]) else None


def earlier_directory(job: Job, refused: Path, env: Mapping[str, str] = os.environ) -> Path | None:
    """For a start by hand: the newest directory but `refused` that has trained this very job and has a checkpoint.

    None for a restarted run: it has its own directory, and takes no other.
    """
    if any(launcher_names(job, env).values()):
        return None
    for directory in reversed(_existing_directories(job)):
        if directory != refused and _lists_job(job, directory) and resumable_checkpoints(job, directory):
            return directory
    return None


def _lists_job(job: Job, directory: Path) -> bool:
    """Whether this very job has trained there, whoever launched it."""
    return job_name(job) in (read_run_names(run_place(job, directory)) or [])


def lists_run(job: Job, directory: Path, env: Mapping[str, str] = os.environ) -> bool:
    """Whether this run has trained there before, by a name that a launcher gave it."""
    return bool(set(read_run_names(run_place(job, directory)) or []) & set(launcher_names(job, env)))


def enter_directory(job: Job, directory: Path | None, env: Mapping[str, str] = os.environ) -> Path:
    """The directory, or a new one if None, after adding this run to its list."""
    names = [*launcher_names(job, env), job_name(job)]
    if directory is None:
        return _make_directory(job, len(_existing_directories(job)) + 1, names)
    with suppress(OSError):  # with checkpoint.url, this machine may see it for the first time
        directory.mkdir(parents=True, exist_ok=True)
    place = run_place(job, directory)
    write_run_names(place, [*(read_run_names(place) or []), *names])
    return directory


def run_place(job: Job, directory: Path) -> Place:
    """Where checkpoints and the list of runs are: the run's directory, or its name below checkpoint.url."""
    return remote_of(job.checkpoint.url) / directory.name if job.checkpoint.url else directory


def run_store(job: Job, directory: Path) -> Store:
    """The checkpoints of a run."""
    return Store(run_place(job, directory) / "checkpoints")


def resumable_checkpoints(job: Job, directory: Path) -> list[Checkpoint]:
    """The complete checkpoints, and this machine's snapshots in memory, newest first.

    Raises UserError if there are none, but the run has some at another place, which its job named before.
    """
    place = run_place(job, directory)
    try:
        on_disk = run_store(job, directory).complete()
    except OSError as error:
        raise UserError(f"cannot look at {place}: {error.strerror}", "file.read") from None
    snapshots = local_snapshots(place)  # there may be some before the first checkpoint on disk
    if on_disk or snapshots:
        return sorted([*snapshots, *on_disk], key=lambda checkpoint: checkpoint.step, reverse=True)
    if job.checkpoint.url and (local := Store(directory / "checkpoints")).complete():
        raise UserError(
            f"{local.directory} has checkpoints, and {place} has none; 'fivefold checkpoint reshard "
            f"{directory} --layout {job.layout} -o {place}' brings the newest there, and another "
            "run.name starts a run of its own",
            "run.moved",
        )
    if problem := _moved_checkpoints(job, directory):
        raise UserError(problem, "run.moved")
    return []


def _moved_checkpoints(job: Job, directory: Path) -> str:
    """The problem if the directory's stored job has its checkpoints at another URL; else an empty text."""
    url = ""
    with suppress(UserError, KeyError, TypeError):
        url = str(read_toml(directory / JOB_FILE)["checkpoint"]["url"])
    if url in ("", job.checkpoint.url):
        return ""
    stored = remote_of(url) / directory.name
    try:
        if not Store(stored / "checkpoints").complete():
            return ""
        state = "has them"
    except OSError as error:
        state = f"cannot be accessed: {error.strerror}"
    return (
        f"{run_place(job, directory)} has no checkpoints, and {stored} {state}; the run continues "
        f"with checkpoint.url={url}, 'fivefold checkpoint reshard {stored} --layout {job.layout} -o NEW' makes a run "
        "elsewhere of the newest, and another run.name or --fresh starts one of its own"
    )


def lock_directory(directory: Path) -> None:
    """Locks the directory, in which one process at a time trains. The lock ends with the process, however it ends."""
    try:
        file = open_regular(directory / "claim", append=True)
    except OSError as error:
        raise cannot_write(directory / "claim", error) from None
    _LOCKED_FILES.append(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process is training in {directory}; --fresh starts a run of its own, and so does another "
            "run.name",
            "run.taken",
        ) from None
    except OSError:  # a file system without locks
        pass


def _existing_directories(job: Job) -> list[Path]:
    """The directories of the run's name that exist, here or at checkpoint.url, the oldest first."""
    parent, remote_names = path_of(job.run.dir), set[str]()
    if job.checkpoint.url:
        url = remote_of(job.checkpoint.url)
        try:
            remote_names = {folder.name for folder in storage_of(url).folders(url)}
        except OSError as error:
            raise UserError(f"cannot look at checkpoint.url={url}: {error.strerror}", "checkpoint.url.reach") from None
    directories: list[Path] = []
    while (name := _directory_name(job, len(directories) + 1)) in remote_names or (parent / name).exists():
        directories.append(parent / name)
    return directories


def _directory_name(job: Job, number: int) -> str:
    return job.run.name if number == 1 else f"{job.run.name}-{number}"


def _make_directory(job: Job, number: int, names: list[str]) -> Path:
    """Makes the directory of the first free number from `number`, with a list of these names."""
    while True:
        directory = path_of(job.run.dir) / _directory_name(job, number)
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise UserError(f"cannot make the run's directory {directory}: {error.strerror}", "run.dir.write") from None
        try:
            write_run_names(run_place(job, directory), names)
        except UserError:
            with suppress(OSError):
                directory.rmdir()
            raise
        return directory
