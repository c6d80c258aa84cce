"""Files: regular ones opened, hashed and written, with an error that says why not; directories made whole or not."""

import errno
import hashlib
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_int64
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fivefold.support.errors import UserError
from fivefold.support.text import bytes_text

Progress = Callable[[int], None]  # called with the bytes of every piece
_HASH_CHUNK = 1 << 22  # bytes hashed at a time
_READ_BYTES = 1 << 24  # bytes read in one system call
_SYNC_BYTES = 1 << 28  # bytes synced to the disk at a time
_SYNC_RANGE = getattr(CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
_ON_DISK = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER


class File(msgspec.Struct, frozen=True):
    """A file as an index or a manifest lists it."""

    name: str
    bytes: int
    sha256: str


def plain_name(name: str) -> bool:
    """Whether a name that was read from a file is a plain file name, without any path."""
    try:
        return 0 < len(os.fsencode(name)) <= 255 and name not in (".", "..") and "/" not in name and "\0" not in name
    except UnicodeEncodeError:  # a lone surrogate
        return False


class Readable(Protocol):
    def read(self, count: int, /) -> bytes | None: ...


class Regular(io.FileIO):
    """An open file. It is closed with its last reader, without a warning."""

    def __del__(self) -> None:
        self.close()

    def fill(self, into: memoryview, start: int, progress: Progress = lambda _: None) -> None:
        """Read bytes from `start` on until `into` is full."""
        done = 0
        while done < len(into):
            count = os.preadv(self.fileno(), [into[done : done + _READ_BYTES]], start + done)
            if not count:
                raise OSError("a file has become shorter")
            done += count
            progress(count)


_FILE_KINDS = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
          stat.S_IFDIR: "directory"}  # fmt: skip


def irregular(mode: int) -> str | None:
    """What a file is, by its mode, if it is not a regular file; else None."""
    kind = _FILE_KINDS.get(stat.S_IFMT(mode), "special file")
    return None if stat.S_ISREG(mode) else f"it is a {kind}, not a regular file"


def open_regular(path: Path, *, links: bool = False, append: bool = False) -> Regular:
    """Opens a regular file to read, or to `append` to. Refuses links unless `links`, since they may lead anywhere, and
    pipes, which would wait for the other end."""
    flags = os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    handle = os.open(path, flags | (os.O_WRONLY | os.O_APPEND | os.O_CREAT if append else os.O_RDONLY), 0o666)
    if problem := irregular(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, problem, str(path))
    return Regular(handle, "ab" if append else "rb")


def read_regular(path: Path, max_bytes: int, *, links: bool = False) -> bytes:
    """The contents of a regular file; OSError if it has more than `max_bytes`."""
    with open_regular(path, links=links) as stream:
        if (size := os.fstat(stream.fileno()).st_size) > max_bytes:
            raise OSError(errno.EFBIG, f"it has {bytes_text(size)}, and at most {bytes_text(max_bytes)} are read")
        return stream.read()


def digest(path: Path, progress: Progress | None = None) -> str:
    """sha256 of a file."""
    with open_regular(path, links=True) as stream:
        return digest_of(stream, progress)


def digest_of(stream: Readable, progress: Progress | None = None) -> str:
    """sha256 of the rest of an open file."""
    sha256 = hashlib.sha256()
    while piece := stream.read(_HASH_CHUNK):
        sha256.update(piece)
        if progress:
            progress(len(piece))
    return sha256.hexdigest()


def hash_file(path: Path) -> File:
    return File(path.name, path.stat().st_size, digest(path))


class HashedFile(io.RawIOBase):
    """A new file that computes its checksum while it is written. It has no buffer, so one fsync covers all of it."""

    def __init__(self, path: Path, progress: Progress = lambda _: None):
        self._start(path.name, path.open("wb", buffering=0), progress)

    def _start(self, name: str, raw: Any, progress: Progress) -> None:
        self._name, self._raw, self._progress = name, raw, progress
        self._sum, self._bytes = hashlib.sha256(), 0

    @property
    def file(self) -> File:
        return File(self._name, self._bytes, self._sum.hexdigest())

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write contiguous bytes, or a buffer of them."""
        content = memoryview(data)
        if not content.nbytes:  # an empty view cannot be cast
            return 0
        content = content.cast("B")
        for start in range(0, len(content), _HASH_CHUNK):  # in chunks, so that the CPU's cache has them for both
            rest = content[start : start + _HASH_CHUNK]
            self._sum.update(rest)
            while rest:  # an unbuffered write may write only a part
                rest = rest[self._raw.write(rest) :]
            self._progress(_HASH_CHUNK)
        self._bytes += len(content)
        return len(content)

    def tell(self) -> int:
        return self._bytes

    def fileno(self) -> int:
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()
        super().close()

    def finish(self) -> File:
        """Sync the file to the disk and close it; returns its size and checksum."""
        with self:
            if _SYNC_RANGE is not None:  # piece by piece, as a single fsync would report no progress
                for start in range(0, self._bytes, _SYNC_BYTES):
                    _SYNC_RANGE(self.fileno(), c_int64(start), c_int64(_SYNC_BYTES), _ON_DISK)
                    self._progress(0)
            os.fsync(self.fileno())
        return self.file


def write(path: Path, content: str | bytes) -> None:
    """Write a file; a UserError says why it cannot be written."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "file.write") from None


def put(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, and replace what is there; an OSError says why it cannot be written."""
    temporary = path.with_name(f"{path.name}.half")
    temporary.unlink(missing_ok=True)  # to write into a FIFO of that name would wait for a reader
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.rename(path)


def cannot_write(path: Path, error: OSError) -> UserError:
    """The error about a file that cannot be written, with the free space there."""
    near = next(folder for folder in path.absolute().parents if folder.exists())
    free = bytes_text(shutil.disk_usage(near).free)
    return UserError(f"cannot write {path}: {error.strerror or error}; {free} are free there", "file.write")


def sync(path: Path) -> None:
    """Sync a file to the disk; of a directory, the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_or_nothing(output: Path) -> Iterator[None]:
    """Around the code that makes a directory: if it fails, the directory is removed, and an OSError such as a full disk
    becomes a UserError."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} already exists and is not empty; give -o a new name", "output.taken")
    try:
        yield
    except BaseException as error:
        shutil.rmtree(output, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise cannot_write(output, error) from None
