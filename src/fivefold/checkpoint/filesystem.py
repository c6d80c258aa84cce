"""The storage of checkpoints: the operations on files of a directory of this machine, or of object storage.

    storage = storage_of(path)                    # for a Path, or for a RemotePlace (`object_storage.py`)
    with storage.create(path / "a", beat) as new:
        new.write(data)
        file = new.finish()                       # with its hash; synced
    with storage.open(path / "a") as stream:
        stream.fill(memory, 4096)                 # reads exactly the memory's size, from byte 4096 on

Every operation that fails raises an OSError whose `strerror` is a sentence. No torch.
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
    """Operations on places of one kind: Path or RemotePlace."""

    def read(self, place: Any, most: int) -> bytes: ...
    def open(self, place: Any) -> FileReader: ...
    def sizes(self, folder: Any, names: Iterable[str]) -> dict[str, int | OSError]: ...
    def exists(self, place: Any) -> bool: ...
    def holds(self, folder: Any) -> bool:
        """Whether the folder exists."""

    def folders(self, directory: Any) -> list[Any]: ...
    def create(self, place: Any, progress: Progress) -> HashedFile: ...
    def put(self, place: Any, content: bytes) -> None:
        """Writes a small file atomically, over an existing one."""

    def commit(self, place: Any, content: bytes, others: Iterable[str], before: Callable[[], object]) -> None:
        """Writes the last file of a folder, after syncing the others; calls `before` just before it gets its name."""

    def make(self, folder: Any) -> None:
        """Makes a folder; FileExistsError where there is one."""

    def rename(self, folder: Any, to: Any) -> None: ...
    def delete(self, folder: Any) -> None:
        """Deletes a folder with its files; errors are ignored."""

    def point(self, directory: Any, name: str | None) -> None:
        """Makes the link `latest` to a folder of this name; None removes it. Nothing where there are no links."""

    def free(self, directory: Any) -> int | None:
        """The free bytes; None where there is no limit."""


class Directories:
    """Directories of this machine, or of a shared file system."""

    def read(self, place: Path, most: int) -> bytes:
        return read_regular(place, most)

    def open(self, place: Path) -> Regular:
        return open_regular(place)

    def sizes(self, folder: Path, names: Iterable[str]) -> dict[str, int | OSError]:
        return {name: _size(folder / name) for name in names}

    def exists(self, place: Path) -> bool:
        """Whether the file exists; True if that cannot be seen: reading it raises the error."""
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
        folder.parent.mkdir(exist_ok=True)  # not its parents: a run's directory that was deleted is not made again
        folder.mkdir()

    def rename(self, folder: Path, to: Path) -> None:
        folder.rename(to)

    def delete(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def point(self, directory: Path, name: str | None) -> None:
        """Makes the link `latest`; errors are ignored, since checkpoints do not need it."""
        latest, link = directory / "latest", directory / "latest.half"
        with suppress(OSError):
            if name is None:
                if latest.is_symlink():
                    latest.unlink()
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
    from fivefold.checkpoint.object_storage import objects

    return objects(place)


def reach(url: str) -> None:
    """Raises UserError unless checkpoints can be listed, written and deleted there, before a run starts."""
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
    """Raises UserError if the place exists, or if writing there, in the `with` block, fails."""
    try:
        if storage_of(place).holds(place):
            raise UserError(f"{place} is there already; give -o a new name", "output.taken")
        yield
    except OSError as error:
        raise UserError(f"cannot write {place}: {error.strerror or error}", "file.write") from None
