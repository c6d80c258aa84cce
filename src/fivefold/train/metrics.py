"""metrics.jsonl: one line a record, each with its sum, so that a damaged line is known, counted and left out."""

import io
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from fivefold.support.documents import BROKEN
from fivefold.support.errors import UserError
from fivefold.support.files import open_regular
from fivefold.support.formatting import bytes_text
from fivefold.train.records import Decision, Evaluation, Judged, Step

Record = Step | Evaluation | Decision | Judged  # the last in decisions.jsonl alone
_SUM = re.compile(rb',"crc":"([0-9a-f]{8})"}\n?\Z')
MOST = 1 << 32  # bytes of a file that another process may have written
_LONGEST = 1 << 22  # bytes of a line that is looked at
_KEPT = 1 << 24  # bytes of records that wait for a disk with room


def to_line(record: Record) -> bytes:
    body = msgspec.json.encode(record)
    return body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body)


def from_line(line: bytes) -> Record | None:
    """None if it is not what was written. Lines of earlier releases have no sum."""
    if not line.lstrip().startswith(b"{"):  # a decoder takes longer to say so
        return None
    found = _SUM.search(line)
    if found and zlib.crc32(line[: found.start()] + b"}") != int(found[1], 16):
        return None
    try:
        record: Record = msgspec.json.decode(line, type=Record)
    except BROKEN:
        return None
    if isinstance(record, Step) and not record.loss_tokens:  # earlier releases wrote a loss of 0
        return msgspec.structs.replace(record, loss=None)
    return record


def read(path: Path, most: int = MOST) -> Iterator[tuple[bytes, Record | None]]:
    """Every line, and its record if it is sound; nothing of a file that is not there. UserError of one that has more
    than `most` bytes."""
    try:
        raw = open_regular(path)
    except FileNotFoundError:
        return
    with io.BufferedReader(raw) as file:
        if (size := os.fstat(raw.fileno()).st_size) > most:
            raise UserError(
                f"{path} has {bytes_text(size)}, and at most {bytes_text(most)} are read; move it away: its run goes "
                "on without it, and writes a new one"
            )
        while line := file.readline(_LONGEST):
            yield line, from_line(line)


def place(record: Record) -> int:
    """The step after which a record stands."""
    if isinstance(record, Judged):
        return 0
    return record.place if isinstance(record, Decision) else record.step


def trim(path: Path, step: int, most: int = MOST) -> tuple[list[Step], int]:
    """The steps in a metrics file up to `step`, and how many lines are damaged. Those are removed, and so are later
    records, of a run that was cut short."""
    steps, damaged, change = [], 0, False
    for line, record in read(path, most):
        damaged += record is None
        change |= record is None or place(record) > step or not line.endswith(b"\n")
        if isinstance(record, Step) and record.step <= step:
            steps.append(record)
    if change:
        half = path.with_suffix(".half")
        half.unlink(missing_ok=True)  # a pipe there would wait for a reader
        with half.open("wb") as file:
            for line, record in read(path, most):
                if record and place(record) <= step:
                    file.write(line.rstrip() + b"\n")
        half.rename(path)
    return steps, damaged


class MetricsFile:
    """Writes each record at once, so that a killed run keeps what it had. What cannot be written stops no training:
    it waits in memory, and `lost` records are those of which there was no room there either, or that were deleted."""

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None):
        self.path, self.say = path, say
        self.file = self._open()
        self.waiting, self.written, self.lost, self.why = b"", 0, 0, ""

    def _open(self) -> io.FileIO:
        return open_regular(self.path, append=True)

    def on_step(self, record: Record) -> None:
        self.waiting += to_line(record)
        try:
            self._write()
        except OSError as error:
            if not self.why:
                self.say(f"{self.path} cannot be written: {error.strerror}; its records wait, and training goes on")
            self.why = error.strerror or str(error)
        if len(self.waiting) > _KEPT:
            self.lost, self.waiting = self.lost + self.waiting.count(b"\n"), b"\n"  # which ends half a line

    on_evaluation = on_step

    def on_decision(self, record: Decision) -> None:
        """A rollback takes the steps away that it has undone: the file holds one curve."""
        if record.back is not None and not self.waiting:
            self.file.close()
            try:
                trim(self.path, record.back, sys.maxsize)  # its own, however long: the run goes on
            finally:
                self.file = self._open()
        self.on_step(record)

    def _write(self) -> None:
        if not self._in_place():
            gone, self.file = self.file, self._open()
            gone.close()
            self.lost, self.written, self.why = self.lost + self.written, 0, "it was deleted"
            self.say(f"{self.path} was deleted or moved away; a new one has the records from here on")
        while self.waiting:
            done = self.file.write(self.waiting)
            self.written += self.waiting.count(b"\n", 0, done)
            self.waiting = self.waiting[done:]

    def _in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Try once more."""
        with suppress(OSError):
            self._write()
        self.file.close()
        self.lost += self.waiting.count(b"\n")
