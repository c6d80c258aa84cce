"""The life of a run, as its directory tells it: starts, checkpoints, faults, stops. Logs and names are read, no tensor.

events(run)[0]      # {"kind": "start", "step": 0, "time": 1789651826.0, "text": "2 ranks on node-1", ...}
"""

import os
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

from fivefold.checkpoint.store import MANIFEST, Checkpoint, Store
from fivefold.support.errors import UserError
from fivefold.support.files import open_regular
from fivefold.support.formatting import bytes_text, counted
from fivefold.ui.run_files import Run, told

LOGS, RANKS = 1 << 21, 16  # bytes of a log's end, and logs, that are read
WIDE = 2000  # characters of a line
CHECKPOINTS, EVENTS = 100, 400  # the newest
MANIFESTS = 1 << 26  # bytes of them that are read
_N = r"(\d{1,18})"  # a number that is one
_START = re.compile(rf"={{20}} (\S+) rank {_N} of {_N} on (\S+), pid \d+(?:, start {_N})?")  # of launch/logs.py
_RESUMES = re.compile(rf"resumes from .*, after step {_N}\b")
_STOPPED = re.compile(rf"stopped by (.+) after step {_N}\b")
_DONE = re.compile(r"\d+ steps in [\d.]+ s; job, metrics")
_FATAL = re.compile(r"(?:error: |Fatal Python error: )(.*)")
_STEP = re.compile(rf"\bstep {{1,20}}{_N}\b")
_AT_STEP, _SAID = re.compile(rf"step {{1,20}}{_N}/"), re.compile(rf"step {_N}: ")  # of the display; by watchers
_LATER = (0.0, 0, 0)  # the place of an event in its log is not known yet
_NOTE = re.compile(r"note(?:  |: )(.*)")


class Event(NamedTuple):
    kind: str  # start | restart | checkpoint | aside | fault | stop | end | note
    step: int | None  # steps that were done, where that is known
    time: float | None  # seconds since 1970
    text: str
    order: tuple[float, int, int]  # about when, in which start of the run, and where in it
    bytes: int | None = None  # of a checkpoint


def events(run: Run, left: list[str] | None = None) -> list[dict[str, Any]]:
    """In the order in which they happened. `left` gets what is to be said of what was not read."""
    left, found = [] if left is None else left, list[Event]()
    for part in (_checkpoints, _logged):
        try:
            found += part(run, left)
        except OSError as error:  # it goes while it is read, or is not for this user
            left.append(f"{told(error.filename or run.name)} cannot be read: {error.strerror}")
    found.sort(key=lambda one: one.order)
    if len(found) > EVENTS:
        left.append(f"{len(found) - EVENTS:,} earlier events are not shown")
    return [{name: getattr(one, name) for name in ("kind", "step", "time", "text", "bytes")} for one in found[-EVENTS:]]


def signature(run: Run) -> str:
    """Another one when there may be new events."""
    found = []
    for name in ("checkpoints", "checkpoints/latest", "logs", "logs/rank-0.log"):
        try:
            known = os.lstat(run.path / name)
            found.append(
                f"{known.st_mtime_ns:x}.{known.st_size:x}" if name != "logs/rank-0.log" else f"{known.st_size:x}"
            )
        except OSError:
            found.append("")
    return "-".join(found)


def _checkpoints(run: Run, left: list[str]) -> Iterator[Event]:
    folder = run.inside("checkpoints")
    if folder is None or not folder.is_dir():
        return
    store, room = Store(folder), MANIFESTS
    complete = store.complete()
    if len(complete) > CHECKPOINTS:
        left.append(f"{len(complete) - CHECKPOINTS:,} earlier checkpoints are not listed")
    for checkpoint in complete[:CHECKPOINTS]:
        name = str(getattr(checkpoint.path, "name", ""))
        if run.inside("checkpoints", name, MANIFEST) is None:
            continue
        known = os.lstat(folder / name / MANIFEST)
        time, room = known.st_mtime, room - known.st_size
        text, size = _described(checkpoint) if room >= 0 else ("its manifest is too long to be read here", None)
        yield Event("checkpoint", checkpoint.step, time, text, (time, -1, 0), size)
    for aside in store.aside():
        path = folder / str(aside.name)
        time, step = os.lstat(path).st_mtime, re.search(rf"step-{_N}\b", path.name)
        word = next((word for word in ("damaged", "suspect") if f".{word}" in path.name), "incomplete")
        text = f"{told(path.name)}: {'an' if word == 'incomplete' else 'a'} {word} checkpoint, set aside"
        yield Event("aside", int(step[1]) if step else None, time, text, (time, -1, 0))


def _described(checkpoint: Checkpoint) -> tuple[str, int | None]:
    try:
        return counted(len(checkpoint.manifest.files), "file"), checkpoint.bytes
    except UserError as error:
        return told(error.problems[0].replace(str(checkpoint.path), checkpoint.path.name)), None


def _logged(run: Run, left: list[str]) -> Iterator[Event]:
    folder = run.inside("logs")
    if folder is None or not folder.is_dir():
        return
    ranks = sorted(
        int(found[1]) for name in os.listdir(folder) if (found := re.fullmatch(r"rank-(\d{1,7})\.log", name))
    )
    if len(ranks) > RANKS:
        left.append(f"logs of {len(ranks) - RANKS:,} more ranks are not read")
    for rank in ranks[:RANKS]:
        text, last = _end_of(run, f"rank-{rank}.log", left)
        yield from _of_log(text, rank, last)


def _end_of(run: Run, name: str, left: list[str]) -> tuple[str, float]:
    path = run.inside("logs", name)
    try:
        if path is None:
            return "", 0.0
        with open_regular(path) as stream:
            known = os.fstat(stream.fileno())
            data = os.pread(stream.fileno(), LOGS, max(0, known.st_size - LOGS))
            if known.st_size > LOGS:
                left.append(f"logs/{name} has {bytes_text(known.st_size)}: its last {bytes_text(LOGS)} were read")
            return data.decode(errors="replace"), known.st_mtime
    except OSError:
        return "", 0.0


def _of_log(text: str, rank: int, last: float) -> Iterator[Event]:
    """Each start has a header with its time; what ends it has none, and is sorted before the next header."""
    lines = [line[:WIDE] for line in text.splitlines()]
    headers = {number: found for number, line in enumerate(lines) if (found := _START.match(line))}
    times = [_seconds(found[1]) for found in headers.values()]
    ends, after = [*times[1:], last], [*list(headers)[1:], len(lines)]
    at, step, traceback = -1, None, False
    for number, line in enumerate(lines):
        if found := headers.get(number):
            at, step, traceback = at + 1, None, False
            if rank == 0:
                own = (_RESUMES.match(lines[later]) for later in range(number + 1, after[at]))
                yield _started(found, times[at], at, next((one for one in own if one), None))
            continue
        end, begin = (ends[at], times[at]) if at >= 0 else (last, last)
        if seen := _AT_STEP.match(line):
            step = int(seen[1])
        for event in _of_line(line, rank, step, traceback):
            moment = (begin, at, 1) if event.kind == "note" else (end, at, 2)
            yield event._replace(
                order=moment, time=last if event.kind in ("stop", "end") and at == len(times) - 1 else None
            )
        traceback = (traceback and line.startswith(" ")) or line.startswith("Traceback (most recent call last)")


def _started(header: re.Match[str], time: float, at: int, resumed: re.Match[str] | None) -> Event:
    number = int(header[5] or 1)
    step = int(resumed[1]) if resumed else 0 if at == 0 and number == 1 else None
    where = f"{counted(int(header[3]), 'rank')}, rank 0 on {header[4]}"
    again = f"resumes after step {resumed[1]}; " if resumed else ""
    return Event("restart" if number > 1 or at > 0 or resumed else "start", step, time, again + where, (time, at, 0))


def _of_line(line: str, rank: int, step: int | None, traceback: bool) -> Iterator[Event]:
    if found := _STOPPED.match(line):
        yield Event("stop", int(found[2]), None, f"stopped by {found[1]}", _LATER)
    elif _DONE.match(line):
        yield Event("end", step, None, line.partition(";")[0], _LATER)
    elif found := _FATAL.match(line):
        seen = _STEP.search(line)
        yield Event("fault", int(seen[1]) if seen else step, None, _named(rank, found[1]), _LATER)
    elif traceback and line.strip() and not line.startswith(" "):
        yield Event("fault", step, None, _named(rank, line), _LATER)
    elif found := _NOTE.match(line):
        said = _SAID.match(found[1])
        yield Event("note", int(said[1]) if said else step, None, found[1].strip(), _LATER)


def _named(rank: int, sentence: str) -> str:
    short = sentence.strip()[:300]
    return short if f"rank {rank}" in short else f"rank {rank}: {short}"


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0
