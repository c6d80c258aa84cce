"""What a store of checkpoints asks of the place where they lie: a directory of this machine, or object storage.

    storage = storage_of(path)                    # of a Path, or of a Remote (`objects.py`)
    with storage.create(path / "a", beat) as new:
        new.write(data)
        file = new.finish()                       # with its sum; it is there to stay
    with storage.open(path / "a") as stream:
        stream.fill(memory, 4096)                 # so many bytes from there on, and no others

Every operation that fails raises an OSError whose `strerror` is a sentence for people. No torch.
"""

import errno
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from fivefold.support.errors import UserError
from fivefold.support.files import HashedFile, Progress, Regular, open_regular, put, read_regular, sync
from fivefold.support.places import Place, RemotePlace, remote_of


class FileReader(Protocol):
    """An open file."""

    def read(self, count: int, /) -> bytes | None: ...
    def fill(self, into: memoryview, start: int, progress: Progress = ..., /) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Storage(Protocol):
    """Places are those of its own kind."""

    def read(self, place: Any, most: int) -> bytes: ...
    def open(self, place: Any) -> FileReader: ...
    def sizes(self, folder: Any, names: Iterable[str]) -> dict[str, int | OSError]: ...
    def exists(self, place: Any) -> bool: ...
    def holds(self, folder: Any) -> bool:
        """Whether there is such a folder."""

    def folders(self, directory: Any) -> list[Any]: ...
    def create(self, place: Any, progress: Progress) -> HashedFile: ...
    def put(self, place: Any, content: bytes) -> None:
        """A small file, whole or not at all, whatever is in its place."""

    def commit(self, place: Any, content: bytes, others: Iterable[str], before: Callable[[], object]) -> None:
        """The last file of a folder, when the others are there to stay; `before` is called before the last act."""

    def make(self, folder: Any) -> None:
        """FileExistsError where there is one."""

    def rename(self, folder: Any, to: Any) -> None: ...
    def delete(self, folder: Any) -> None:
        """As far as that goes."""

    def point(self, directory: Any, name: str | None) -> None:
        """People find the newest one under `latest`, where there are links."""

    def free(self, directory: Any) -> int | None:
        """Bytes; None: nobody counts them."""


class Directories:
    """Of this machine, or of a file system that it shares with others."""

    def read(self, place: Path, most: int) -> bytes:
        return read_regular(place, most)

    def open(self, place: Path) -> Regular:
        return open_regular(place)

    def sizes(self, folder: Path, names: Iterable[str]) -> dict[str, int | OSError]:
        return {name: _size(folder / name) for name in names}

    def exists(self, place: Path) -> bool:
        """What cannot be looked at may be there: reading it says why it cannot."""
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            pass
        return True

    def holds(self, folder: Path) -> bool:
        return folder.is_dir()

    def folders(self, directory: Path) -> list[Path]:
        return list(directory.iterdir()) if directory.is_dir() else []

    def create(self, place: Path, progress: Progress) -> HashedFile:
        return HashedFile(place, progress)

    def put(self, place: Path, content: bytes) -> None:
        put(place, content)

    def commit(self, place: Path, content: bytes, others: Iterable[str], before: Callable[[], object]) -> None:
        for name in others:
            sync(place.with_name(name))
        half = place.with_name(f"{place.name}.half")
        half.write_bytes(content)
        sync(half)
        before()
        half.rename(place)
        sync(place.parent)
        sync(place.parent.parent)

    def make(self, folder: Path) -> None:
        folder.parent.mkdir(exist_ok=True)  # not its parents: a run's directory that is gone is not made again
        folder.mkdir()

    def rename(self, folder: Path, to: Path) -> None:
        folder.rename(to)

    def delete(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def point(self, directory: Path, name: str | None) -> None:
        """A checkpoint is one without it, where links cannot be made or `latest` is something else."""
        latest, link = directory / "latest", directory / "latest.half"
        with suppress(OSError):
            if name is None:
                latest.unlink() if latest.is_symlink() else None
                return
            link.unlink(missing_ok=True)
            link.symlink_to(name)
            link.rename(latest)

    def free(self, directory: Path) -> int:
        return shutil.disk_usage(directory).free


def _size(place: Path) -> int | OSError:
    try:
        status = place.lstat()
    except OSError as error:
        return error
    return status.st_size if stat.S_ISREG(status.st_mode) else OSError(errno.EINVAL, "not a regular file")


_DIRECTORIES = Directories()


def storage_of(place: Place) -> Storage:
    if not isinstance(place, RemotePlace):
        return _DIRECTORIES
    if missing := place.missing:
        raise UserError(missing, "install.storage")
    from fivefold.checkpoint.objects import objects

    return objects(place)


def reach(url: str) -> None:
    """UserError unless checkpoints can be listed, written and deleted there: before a run starts, not at its first."""
    place = remote_of(url)
    storage, trial = storage_of(place), place / f".fivefold-{uuid.uuid4().hex}"
    try:
        storage.folders(place)
        storage.put(trial / "trial", b"")
        storage.delete(trial)
        if storage.holds(trial):
            raise OSError(errno.EACCES, f"what is written there cannot be deleted: {trial}")
    except OSError as error:
        raise UserError(f"checkpoint.url={place} cannot be used: {error.strerror}", "checkpoint.url.reach") from None


@contextmanager
def making_at(place: RemotePlace) -> Iterator[None]:
    """Around the making of a run's checkpoints where nothing is yet."""
    try:
        if storage_of(place).holds(place):
            raise UserError(f"{place} is there already; give -o a new name", "output.taken")
        yield
    except OSError as error:
        raise UserError(f"cannot write {place}: {error.strerror or error}", "file.write") from None
