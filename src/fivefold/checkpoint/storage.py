"""Where checkpoints are stored: the `Storage` protocol, and its implementation for directories (`object_storage.py` has
the one for buckets).

    storage = storage_of(path)                    # for a Path or a RemotePlace
    with storage.create(path / "a", progress) as new:
        new.write(data)
        file = new.finish()                       # synced; has the file's hash
    with storage.open(path / "a") as stream:
        stream.fill(memory, 4096)                 # reads exactly the memory's size, from byte 4096 on

A `directory` is the parent of checkpoints, a `folder` is one checkpoint in it. Every operation that fails raises an
OSError whose `strerror` is a sentence. No torch.
"""

import errno
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from fivefold.support.errors import UserError
from fivefold.support.files import HashedFile, Progress, Regular, open_regular, put, read_regular, sync
from fivefold.support.storage_place import Place, RemotePlace, remote_of

P = TypeVar("P")


class FileReader(Protocol):
    """An open file."""

    def read(self, count: int, /) -> bytes | None: ...
    def fill(self, into: memoryview, start: int, progress: Progress = ..., /) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Storage(Protocol[P]):
    """File operations on one kind of place: Path or RemotePlace."""

    def read(self, place: P, max_bytes: int) -> bytes: ...
    def open(self, place: P) -> FileReader: ...
    def sizes(self, folder: P, names: Iterable[str]) -> dict[str, int | OSError]: ...
    def file_exists(self, place: P) -> bool: ...
    def folder_exists(self, folder: P) -> bool: ...
    def folders(self, directory: P) -> list[P]: ...
    def create(self, place: P, progress: Progress) -> HashedFile: ...
    def put(self, place: P, content: bytes) -> None:
        """Writes a small file atomically; replaces an existing one."""

    def commit(self, place: P, content: bytes, others: Iterable[str], before_rename: Callable[[], object]) -> None:
        """Writes the last file of a folder after syncing the others. Calls `before_rename` just before the rename makes
        the file visible."""

    def make_folder(self, folder: P) -> None:
        """Makes a folder; FileExistsError if it exists."""

    def rename(self, folder: P, to: P) -> None: ...
    def delete(self, folder: P) -> None:
        """Deletes a folder with its files; errors are ignored."""

    def link_latest(self, directory: P, name: str | None) -> None:
        """Points the link `latest` at the folder `name`; None removes it. Does nothing on storage without links."""

    def free_bytes(self, directory: P) -> int | None:
        """The free bytes; None if there is no limit."""


class Directories:
    """Directories of this machine, or of a shared file system."""

    def read(self, place: Path, max_bytes: int) -> bytes:
        return read_regular(place, max_bytes)

    def open(self, place: Path) -> Regular:
        return open_regular(place)

    def sizes(self, folder: Path, names: Iterable[str]) -> dict[str, int | OSError]:
        return {name: _size(folder / name) for name in names}

    def file_exists(self, place: Path) -> bool:
        """True also if its existence cannot be determined, so that the later read reports the error."""
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            pass
        return True

    def folder_exists(self, folder: Path) -> bool:
        return folder.is_dir()

    def folders(self, directory: Path) -> list[Path]:
        return list(directory.iterdir()) if directory.is_dir() else []

    def create(self, place: Path, progress: Progress) -> HashedFile:
        return HashedFile(place, progress)

    def put(self, place: Path, content: bytes) -> None:
        put(place, content)

    def commit(self, place: Path, content: bytes, others: Iterable[str], before_rename: Callable[[], object]) -> None:
        for name in others:
            sync(place.with_name(name))
        temporary = place.with_name(f"{place.name}.half")
        temporary.write_bytes(content)
        sync(temporary)
        before_rename()
        temporary.rename(place)
        sync(place.parent)
        sync(place.parent.parent)  # the folder's own entry

    def make_folder(self, folder: Path) -> None:
        folder.parent.mkdir(exist_ok=True)  # not parents=True: a run's directory that was deleted stays deleted
        folder.mkdir()

    def rename(self, folder: Path, to: Path) -> None:
        folder.rename(to)

    def delete(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def link_latest(self, directory: Path, name: str | None) -> None:
        """Sets the link `latest`; errors are ignored, since it is only a convenience."""
        latest, new_link = directory / "latest", directory / "latest.half"
        with suppress(OSError):
            if name is None:
                if latest.is_symlink():
                    latest.unlink()
                return
            new_link.unlink(missing_ok=True)
            new_link.symlink_to(name)
            new_link.rename(latest)

    def free_bytes(self, directory: Path) -> int:
        return shutil.disk_usage(directory).free


def _size(place: Path) -> int | OSError:
    try:
        status = place.lstat()
    except OSError as error:
        return error
    return status.st_size if stat.S_ISREG(status.st_mode) else OSError(errno.EINVAL, "not a regular file")


_DIRECTORIES = Directories()


def storage_of(place: Place) -> Storage[Any]:
    """The storage that has a place; UserError if its driver is not installed."""
    if not isinstance(place, RemotePlace):
        return _DIRECTORIES
    if missing := place.missing_package_message:
        raise UserError(missing, "install.storage")
    from fivefold.checkpoint.object_storage import object_storage_of

    return object_storage_of(place)


def check_storage_is_writable(url: str) -> None:
    """Raises UserError unless a file can be written, listed and deleted at the URL: it tries with an empty one."""
    place = remote_of(url)
    storage, trial = storage_of(place), place / f".fivefold-{uuid.uuid4().hex}"
    try:
        storage.folders(place)
        storage.put(trial / "trial", b"")
        storage.delete(trial)
        if storage.folder_exists(trial):
            raise OSError(errno.EACCES, f"files written there cannot be deleted: {trial}")
    except OSError as error:
        raise UserError(f"checkpoint.url={place} cannot be used: {error.strerror}", "checkpoint.url.reach") from None


@contextmanager
def new_output_at(place: RemotePlace) -> Iterator[None]:
    """Raises UserError if the place exists, or if the `with` block fails to write it."""
    try:
        if storage_of(place).folder_exists(place):
            raise UserError(f"{place} already exists; give -o a new name", "output.taken")
        yield
    except OSError as error:
        raise UserError(f"cannot write {place}: {error.strerror or error}", "file.write") from None
