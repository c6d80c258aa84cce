"""Files that are known by their bytes: sums, files written or refused, and directories made whole or not at all."""

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from fivefold.support.errors import UserError
from fivefold.support.formatting import bytes_text

Progress = Callable[[int], None]  # told the bytes of every piece
_CHUNK = 1 << 22  # bytes hashed at a time


class File(msgspec.Struct, frozen=True):
    """A file as an index or a manifest promises it."""

    name: str
    bytes: int
    sha256: str


def digest(path: Path, progress: Progress | None = None) -> str:
    """sha256 of a file."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while piece := stream.read(_CHUNK):
            found.update(piece)
            if progress:
                progress(len(piece))
    return found.hexdigest()


def hashed(path: Path) -> File:
    return File(path.name, path.stat().st_size, digest(path))


class HashedFile(io.RawIOBase):
    """A new file that computes its checksum while it is written. It has no buffer, so one fsync covers all of it."""

    def __init__(self, path: Path):
        self._path, self._raw = path, path.open("wb", buffering=0)
        self._sum, self._bytes = hashlib.sha256(), 0

    @property
    def file(self) -> File:
        return File(self._path.name, self._bytes, self._sum.hexdigest())

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Anything that is bytes in one piece."""
        whole = memoryview(data)
        if not whole.nbytes:  # which cannot be cast
            return 0
        whole = whole.cast("B")
        for start in range(0, len(whole), _CHUNK):  # hashed and then written while the cache has them
            rest = whole[start : start + _CHUNK]
            self._sum.update(rest)
            while rest:  # an unbuffered write may take less than it was given
                rest = rest[self._raw.write(rest) :]
        self._bytes += len(whole)
        return len(whole)

    def tell(self) -> int:
        return self._bytes

    def fileno(self) -> int:
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()
        super().close()

    def finish(self) -> File:
        """What it is, once its bytes are on the disk."""
        with self:
            os.fsync(self.fileno())
        return self.file


def write(path: Path, content: str | bytes) -> None:
    """Write a file, or say why it cannot be written."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def sync(path: Path) -> None:
    """Onto the disk; of a directory, its names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_or_nothing(output: Path) -> Iterator[None]:
    """Around the making of a directory: if it fails, what there is of it is gone, and a full disk is a sentence."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is there already, and is not empty; give -o a new name")
    try:
        yield
    except BaseException as error:
        shutil.rmtree(output, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        near = next(folder for folder in output.absolute().parents if folder.exists())
        free = bytes_text(shutil.disk_usage(near).free)
        raise UserError(f"cannot write {output}: {error.strerror or error}; {free} are free there") from None
