"""Which files of prepared tokens have been hashed and were as the index promises, kept in the user's cache.

A file is known by its path, size, inode and times, so the next start need not hash it again. What decays on the disk
without a write keeps its times: `fivefold data check` hashes whatever is known here.
"""

import fcntl
import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from fivefold.data.cache import user_cache
from fivefold.data.index import DataFile
from fivefold.support.errors import UserError

# A write that follows another within a tick of the clock leaves the same time: a file this young is not remembered.
_SETTLED = 2_000_000_000  # ns


class Known(msgspec.Struct, frozen=True, array_like=True):
    sha256: str
    bytes: int
    inode: int
    modified: int  # ns
    changed: int  # ns: what a program that sets `modified` back cannot set


class Checked:
    """Of one directory. A cache that cannot be read or written is none."""

    def __init__(self, directory: Path, home: Path | None = None):
        self._directory, self._file = directory, None
        with suppress(OSError, UserError):
            name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]
            self._file = user_cache("checked", home) / f"{name}.json"
        self._known, self._new = self._read(), dict[str, Known]()

    def look(self, file: DataFile) -> Known | None:
        """What the file is now, if it can be told by that later; the promised checksum is taken to be its own."""
        try:
            found = (self._directory / file.name).stat()
        except OSError:
            return None
        if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED:
            return None
        return Known(file.sha256, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)

    def __contains__(self, file: DataFile) -> bool:
        known = self._known.get(file.name)
        return known is not None and known == self.look(file)

    def add(self, file: DataFile, before: Known | None) -> None:
        """A file was hashed and is as promised; `before` is what it was when the hashing began."""
        if before is not None and self.look(file) == before:
            self._new[file.name] = before

    def save(self) -> None:
        """Add what is new to what is kept by now. Written whole or not at all; who is second waits."""
        if not self._new or self._file is None:
            return
        half = self._file.with_suffix(f".{os.getpid()}")
        with suppress(OSError), self._file.with_suffix(".lock").open("w") as lock:
            with suppress(OSError):  # a file system without locks: what is lost is hashed again
                fcntl.flock(lock, fcntl.LOCK_EX)
            half.write_bytes(msgspec.json.encode(self._read() | self._new))
            half.replace(self._file)
            self._known, self._new = self._known | self._new, {}

    def _read(self) -> dict[str, Known]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, Known]) if self._file else {}
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
            return {}
