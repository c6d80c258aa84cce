"""Read the files of prepared tokens, and notice when they change.

Not by memory maps: a file that is cut off while it is mapped ends the process with SIGBUS, a read of it ends in a
sentence. A window costs the same either way, some microseconds and its copy.
"""

import os
import resource
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.data.index import CHUNK, DataFile
from fivefold.support.errors import UserError
from fivefold.support.files import Regular, open_regular


class Seen(NamedTuple):
    """What a file was like when it was first opened."""

    inode: int
    bytes: int
    modified: int


class Files:
    """The files of a directory, the most recently read of them open. Threads may share it."""

    def __init__(self, path: Path):
        self.path = path
        self.touched: dict[str, bytearray] = {}  # for each file, and each CHUNK of it, whether it was ever read
        self._open: dict[str, Regular] = {}  # the most recent one last
        self._seen: dict[str, Seen] = {}
        self._lock = threading.Lock()
        # A quarter of what the process may open; large sets have more files than that.
        self._most = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))

    def read(self, file: DataFile, begin: int, out: NDArray[Any]) -> None:
        """Fill `out` with what the file has from byte `begin` on."""
        if not out.size:
            return
        view, done = out.view(np.uint8).data, 0
        try:
            stream = self._stream(file)
            while done < len(view):
                count = os.preadv(stream.fileno(), [view[done:]], begin + done)
                if not count:
                    break
                done += count
            now = _seen(stream)
        except OSError as error:
            raise UserError(
                f"{self.path / file.name} cannot be read at byte {begin + done}: {error.strerror}"
            ) from None
        self._compare(file, now)
        self.touch(file, begin, begin + len(view))

    def touch(self, file: DataFile, begin: int, end: int) -> None:
        """Count bytes as read."""
        touched = self.touched.get(file.name)
        if touched is None:
            touched = self.touched.setdefault(file.name, bytearray(-(-file.bytes // CHUNK)))
        for chunk in range(begin // CHUNK, (end - 1) // CHUNK + 1):
            touched[chunk] = True

    def _stream(self, file: DataFile) -> Regular:
        with self._lock:
            stream = self._open.pop(file.name, None)
            if stream is None:
                stream = open_regular(self.path / file.name, links=True)
                self._seen.setdefault(file.name, _seen(stream))
            self._open[file.name] = stream
            if len(self._open) > self._most:
                del self._open[next(iter(self._open))]  # a thread that reads it still holds it
            return stream

    def _compare(self, file: DataFile, now: Seen) -> None:
        """After every read: what was read is from before any change that is found later."""
        if now.bytes < file.bytes:
            raise UserError(
                f"{self.path / file.name} was cut off while it was read: it ends at byte {now.bytes}, and the index "
                f"promises {file.bytes} bytes; copy it again"
            )
        if now != self._seen[file.name]:
            raise UserError(
                f"{self.path / file.name} was replaced or changed while it was read; tokens that are in use must stay "
                "as they are: prepare into another directory"
            )


def _seen(stream: Regular) -> Seen:
    found = os.fstat(stream.fileno())
    return Seen(found.st_ino, found.st_size, found.st_mtime_ns)
