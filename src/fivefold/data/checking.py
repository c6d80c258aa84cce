"""Whether the bytes of prepared tokens are those that were prepared.

verify(store)                   hashes every file, now
checker = Checker(store, ...)   hashes them in a thread, beside whatever reads them
checker.start() ... checker.findings ... checker.finish()
"""

import os
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from fivefold.data.checked import Checked
from fivefold.data.index import CHUNK, MEND, DataFile
from fivefold.data.progress import Report, quiet
from fivefold.data.tokens import TokenStore
from fivefold.support.errors import UserError
from fivefold.support.files import Progress, digest, open_regular

_SAVE = 30  # seconds between two writes of the cache
_NAMED = 3  # ranges of a file


class Finding(msgspec.Struct, frozen=True):
    """What is wrong with a file."""

    file: str  # its name in the directory; empty: not one file
    sentence: str
    ranges: list[tuple[int, int]] = []  # of its bytes: [begin, end)


def verify(store: TokenStore, checked: Checked | None = None, progress: Report = quiet) -> None:
    """Refuse a store that is damaged, or whose documents or ids are none."""
    if found := findings(store, checked, progress):
        raise UserError(f"{finding.sentence}; {MEND}" for finding in found)
    store.check_documents()
    store.check_ids(store.vocab)


def findings(store: TokenStore, checked: Checked | None = None, progress: Report = quiet) -> list[Finding]:
    """What is wrong with the files of a store, every byte read; but those that are known in `checked`."""
    files = [file for file in store.index.files() if checked is None or file not in checked]
    done, total = 0, sum(file.bytes for file in files)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    found = [check_file(store.path, file, advance, checked) for file in files]
    if checked is not None:
        checked.save()
    return [finding for finding in found if finding]


def check_file(
    path: Path, file: DataFile, advance: Progress = lambda _: None, checked: Checked | None = None
) -> Finding | None:
    """Hash a file of the directory `path`, and remember in `checked` that it is right."""
    before = checked.look(file) if checked else None
    try:
        found = digest(path / file.name, advance)
        if found != file.sha256:
            promised = f"its sha256 is {found[:16]}..., but the index promises {file.sha256[:16]}..."
            return _damaged(path, file, _wrong_chunks(path, file, range(len(file.chunks) // 8), advance), promised)
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
    return _damaged(path, file, wrong, "their sums are not those that the index promises") if wrong else None


def _wrong_chunks(path: Path, file: DataFile, chunks: Sequence[int], advance: Progress) -> list[int]:
    wrong = []
    with open_regular(path / file.name, links=True) as stream:
        for chunk in chunks:
            found = zlib.crc32(os.pread(stream.fileno(), CHUNK, chunk * CHUNK))
            if f"{found:08x}" != file.chunks[8 * chunk : 8 * chunk + 8]:
                wrong.append(chunk)
            advance(0)
    return wrong


def _damaged(path: Path, file: DataFile, chunks: list[int], why: str) -> Finding:
    ranges: list[tuple[int, int]] = []
    for chunk in chunks:
        begin, end = chunk * CHUNK, min((chunk + 1) * CHUNK, file.bytes)
        if ranges and ranges[-1][1] == begin:
            begin = ranges.pop()[0]
        ranges.append((begin, end))
    named = ", ".join(f"{begin} to {end - 1}" for begin, end in ranges[:_NAMED])
    more = f" and {len(ranges) - _NAMED} more ranges" if len(ranges) > _NAMED else ""
    where = f", within bytes {named}{more} of {file.bytes}" if ranges else ""
    return Finding(file.name, f"{path / file.name} is damaged{where}: {why}", ranges or [(0, file.bytes)])


class Checker:
    """Hashes a store's files beside the run that reads them: those whose number is `share` modulo `of`."""

    def __init__(self, store: TokenStore, checked: Checked, share: int = 0, of: int = 1):
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
            if not self._left or time.monotonic() - saved > _SAVE:
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
