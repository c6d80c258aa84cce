"""Whether the bytes of prepared tokens are those that were prepared.

verify(store)                   hashes every file, now
checker = Checker(store, ...)   hashes them in a thread, while others read them
checker.start() ... checker.findings ... checker.finish()
"""

import fcntl
import hashlib
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from fivefold.data.index import CHUNK_BYTES, REMEDY, DataFile
from fivefold.data.tokens import TokenStore
from fivefold.support.errors import UserError
from fivefold.support.files import Progress, digest, open_regular
from fivefold.support.progress import Report, quiet

# ---- cache ----------------------------------------------------------------------------------------------------------
# The user's cache: the standard corpus, and which files have been hashed. What is in it can be made again.


def user_cache(name: str, home: Path | None = None) -> Path:
    """A directory of ours in the user's cache, or where that cannot be written, a private one for temporary files."""
    try:
        place = (home or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")) / "fivefold" / name
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK):
            return place
    except (OSError, RuntimeError):  # the latter: no home directory at all
        pass
    # A read-only home (a container, a cluster node). The name is fixed so that the ranks of a machine share it, so
    # others can make it too: what they could put there would be trained on.
    private = Path(tempfile.gettempdir()) / f"fivefold-{os.getuid()}"
    private.mkdir(parents=True, exist_ok=True, mode=0o700)
    if private.is_symlink() or private.stat().st_uid != os.getuid():
        way_out = "set XDG_CACHE_HOME to a directory that can be written to"
        raise UserError(f"{private} belongs to somebody else; {way_out}", "cache.owner")
    place = private / name
    place.mkdir(exist_ok=True)
    return place


# ---- checked --------------------------------------------------------------------------------------------------------
# Which files of prepared tokens have been hashed and were as the index promises, kept in the user's cache.
#
# A file is known by its path, size, inode and times, so the next start need not hash it again. What decays on the disk
# without a write keeps its times: `fivefold data check` hashes whatever is known here.


# A write that follows another within a tick of the clock leaves the same time: a file this young is not remembered.
_SETTLED_NS = 2_000_000_000  # ns


class KnownFiles(msgspec.Struct, frozen=True, array_like=True):
    sha256: str
    bytes: int
    inode: int
    modified: int  # ns
    changed: int  # ns: what a program that sets `modified` back cannot set


class CheckedData:
    """Of one directory. A cache that cannot be read or written is none."""

    def __init__(self, directory: Path, home: Path | None = None):
        self._directory, self._file = directory, None
        with suppress(OSError, UserError):
            name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]
            self._file = user_cache("checked", home) / f"{name}.json"
        self._known, self._new = self._read(), dict[str, KnownFiles]()

    def look(self, file: DataFile) -> KnownFiles | None:
        """What the file is now, if it can be told by that later; the promised checksum is taken to be its own."""
        try:
            status = (self._directory / file.name).stat()
        except OSError:
            return None
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED_NS:
            return None
        return KnownFiles(file.sha256, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)

    def __contains__(self, file: DataFile) -> bool:
        known = self._known.get(file.name)
        return known is not None and known == self.look(file)

    def add(self, file: DataFile, before: KnownFiles | None) -> None:
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

    def _read(self) -> dict[str, KnownFiles]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, KnownFiles]) if self._file else {}
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
            return {}


# ---- checking -------------------------------------------------------------------------------------------------------


_SAVE_INTERVAL = 30  # seconds between two writes of the cache
_MAX_NAMED_RANGES = 3  # ranges of a file


class Finding(msgspec.Struct, frozen=True):
    """What is wrong with a file."""

    file: str  # its name in the directory; empty: not one file
    sentence: str
    ranges: list[tuple[int, int]] = []  # of its bytes: [begin, end)
    store: int = 0  # which of the run's directories it is, where there are several


def verify(store: TokenStore, checked: CheckedData | None = None, progress: Report = quiet) -> None:
    """Refuse a store that is damaged, or whose documents or ids are none."""
    if damaged := findings(store, checked, progress):
        raise UserError((f"{finding.sentence}; {REMEDY}" for finding in damaged), "data.file.damaged")
    store.check_documents()
    store.check_ids(store.vocab)


def findings(store: TokenStore, checked: CheckedData | None = None, progress: Report = quiet) -> list[Finding]:
    """What is wrong with the files of a store, every byte read; but those that are known in `checked`."""
    files = [file for file in store.index.files() if checked is None or file not in checked]
    done, total = 0, sum(file.bytes for file in files)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    results = [check_file(store.path, file, advance, checked) for file in files]
    if checked is not None:
        checked.save()
    return [finding for finding in results if finding]


def check_file(
    path: Path, file: DataFile, advance: Progress = lambda _: None, checked: CheckedData | None = None
) -> Finding | None:
    """Hash a file of the directory `path`, and remember in `checked` that it is right."""
    before = checked.look(file) if checked else None
    try:
        sha256 = digest(path / file.name, advance)
        if sha256 != file.sha256:
            promised = f"its sha256 is {sha256[:16]}..., but the index promises {file.sha256[:16]}..."
            return _make_finding(path, file, _wrong_chunks(path, file, range(len(file.chunks) // 8), advance), promised)
    except OSError as error:
        return Finding(file.name, f"{path / file.name} cannot be read: {error.strerror}")
    if checked:
        checked.add(file, before)
    return None


def _checked_chunks(path: Path, file: DataFile, chunks: Sequence[int], advance: Progress) -> Finding | None:
    if not file.chunks:
        return check_file(path, file, advance)
    try:
        wrong = _wrong_chunks(path, file, chunks, advance)
    except OSError as error:
        return Finding(file.name, f"{path / file.name} cannot be read: {error.strerror}")
    return _make_finding(path, file, wrong, "their sums are not those that the index promises") if wrong else None


def _wrong_chunks(path: Path, file: DataFile, chunks: Sequence[int], advance: Progress) -> list[int]:
    wrong = []
    with open_regular(path / file.name, links=True) as stream:
        for chunk in chunks:
            crc = zlib.crc32(os.pread(stream.fileno(), CHUNK_BYTES, chunk * CHUNK_BYTES))
            if f"{crc:08x}" != file.chunks[8 * chunk : 8 * chunk + 8]:
                wrong.append(chunk)
            advance(0)
    return wrong


def _make_finding(path: Path, file: DataFile, chunks: list[int], why: str) -> Finding:
    ranges: list[tuple[int, int]] = []
    for chunk in chunks:
        begin, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, file.bytes)
        if ranges and ranges[-1][1] == begin:
            begin = ranges.pop()[0]
        ranges.append((begin, end))
    named = ", ".join(f"{begin} to {end - 1}" for begin, end in ranges[:_MAX_NAMED_RANGES])
    more = f" and {len(ranges) - _MAX_NAMED_RANGES} more ranges" if len(ranges) > _MAX_NAMED_RANGES else ""
    where = f", within bytes {named}{more} of {file.bytes}" if ranges else ""
    return Finding(file.name, f"{path / file.name} is damaged{where}: {why}", ranges or [(0, file.bytes)])


class Checker:
    """Hashes a store's files while a run reads them: those whose number is `share` modulo `of`."""

    def __init__(self, store: TokenStore, checked: CheckedData, share: int = 0, of: int = 1):
        self.store, self.checked = store, checked
        self.findings: list[Finding] = []
        self._left = [file for file in store.index.files()[share::of] if file not in checked]
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hashing", daemon=True)

    def start(self) -> None:
        if self._left:
            self._thread.start()

    def _work(self) -> None:
        with suppress(OSError):  # of this thread alone, on Linux: steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        saved = time.monotonic()
        while self._left and not self._closed:
            try:
                finding = check_file(self.store.path, self._left[0], self._advance, self.checked)
            except _Closed:
                return
            if finding:
                self.findings.append(finding)
            del self._left[0]
            if not self._left or time.monotonic() - saved > _SAVE_INTERVAL:
                self.checked.save()
                saved = time.monotonic()

    def _advance(self, count: int) -> None:
        if self._closed:
            raise _Closed

    def close(self) -> None:
        """Stop, and keep what is known by now."""
        self._closed = True
        if self._thread.is_alive():
            self._thread.join()
        self.checked.save()

    @property
    def done(self) -> bool:
        return not self._left

    def left(self) -> list[tuple[DataFile, list[int]]]:
        """The chunks that were read of files that have not been hashed."""
        touched = self.store.files.touched
        read = ((file, touched[file.name]) for file in self._left if file.name in touched)
        return [(file, [chunk for chunk, mark in enumerate(marks) if mark]) for file, marks in read]

    def finish(self, advance: Progress = lambda _: None) -> None:
        """Stop, and check those; of a file without sums, all of it. `advance` is told of every few megabytes."""
        self.close()
        for file, chunks in self.left():
            finding = _checked_chunks(self.store.path, file, chunks, advance)
            self.findings += [finding] if finding else []


class _Closed(Exception):
    """Said to the hashing of a file, which would go on for long."""
