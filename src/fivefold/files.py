"""Files that are known by their bytes: sums, and directories that are made whole or not at all."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fivefold.errors import UserError
from fivefold.words import bytes_text

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
