"""The runs below the directories that the user gave, and their files. Nothing outside these directories is opened.

runs, notes = runs_in((Path("/home/me/runs"),))
runs["demo"].path, notes           # notes: sentences about folders that are not runs
"""

import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.checkpoint.manifest import MANIFEST, Checkpoint
from fivefold.checkpoint.store import Store
from fivefold.support.errors import UserError
from fivefold.support.files import open_regular, read_regular
from fivefold.support.parsing import parse_json, parse_toml, parsing
from fivefold.support.text import bytes_text, did_you_mean, plural
from fivefold.trainer.records import METRICS_FILE, Record, from_line

JOB, ENVIRONMENT = "job.toml", "environment.json"
MAX_TABLE_BYTES = {JOB: 1 << 16, ENVIRONMENT: 1 << 20}
MAX_PIECE_BYTES, MAX_PIECE_LINES = 1 << 24, 1 << 16  # of metrics; a page asks for the rest
MAX_LINE_BYTES = 1 << 22  # a longer line is damaged
MAX_PIECES = 8  # a file of up to so many pieces is read whole
SAMPLES = 16  # parts of MAX_LINE_BYTES that are read of a longer file
MAX_RUNS, MAX_FOLDERS = 200, 5000  # that are listed, and looked into


class RunFiles(NamedTuple):
    """A run's directory."""

    name: str  # by which a page asks for it
    path: Path
    root: Path  # the directory that the user gave

    def inside(self, *parts: str) -> Path | None:
        """A path in the run's directory; None if a link leads it out of `root`."""
        path = self.path.joinpath(*parts)
        try:
            return path if path.resolve().is_relative_to(self.root) else None
        except (OSError, RuntimeError):
            return None

    def table(self, name: str, left_out: list[str] | None = None) -> dict[str, Any]:
        """job.toml or environment.json as plain data; empty if it cannot be read, and the reason goes to `left_out`."""
        path, left_out = self.inside(name), [] if left_out is None else left_out
        if path is None:
            return {}
        try:
            with parsing(name, "a table"):
                text = read_regular(path, MAX_TABLE_BYTES[name]).decode()
                table = parse_toml(text) if name.endswith(".toml") else parse_json(text)
        except FileNotFoundError:
            return {}
        except (OSError, UserError) as error:
            left_out.append(f"{name} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error))
            return {}
        return table if isinstance(table, dict) else {}


def runs_in(roots: tuple[Path, ...]) -> tuple[dict[str, RunFiles], list[str]]:
    """The runs by name, those with the newest metrics first; and sentences about what is not among them."""
    runs: list[RunFiles] = []
    notes: list[str] = []
    for root in map(Path.resolve, roots):
        try:
            folder = _read_folder(root)
        except OSError as error:  # it existed when the server started
            notes.append(f"{as_text(root)} cannot be read: {error.strerror}")
            continue
        runs += folder.runs
        if not folder.runs:
            notes.append(f"{as_text(root)} is not a run and contains none: a run has {METRICS_FILE} or {JOB}")
        elif folder.others:
            count, few = plural(len(folder.others), "folder"), _few(folder.others)
            notes.append(f"{count} of {as_text(root)} without {METRICS_FILE}: {few}")
        if folder.outside:
            notes.append(
                f"{_few(folder.outside)} of {as_text(root)} lead out of it and are not read; "
                "`fivefold ui --runs DIRECTORY` reads another directory"
            )
        if folder.not_read:
            notes.append(
                f"{as_text(root)} has {folder.not_read:,} more names than the {MAX_FOLDERS:,} that are looked at"
            )
    runs.sort(key=_age)
    if len(runs) > MAX_RUNS:
        notes.append(f"{len(runs) - MAX_RUNS} older runs are not listed")
    return {run.name: run for run in _with_unique_names(runs[:MAX_RUNS])}, notes


def _few(names: list[str]) -> str:
    """The first five names as text."""
    return ", ".join(map(as_text, names[:5])) + (" ..." if len(names) > 5 else "")


def as_text(path: Path | str) -> str:
    """A path as text that can be sent; on a disk a name may be any bytes."""
    return os.fsencode(path).decode(errors="replace")


class _Folder(NamedTuple):
    runs: list[RunFiles]
    others: list[str]  # directories that are not runs
    outside: list[str]  # links that lead out of the folder, or nowhere
    not_read: int  # names that were not looked at


def _read_folder(root: Path) -> _Folder:
    """The runs of a directory, which may be a run itself."""
    if _is_run(root):
        return _Folder([RunFiles(root.name, root, root)], [], [], 0)
    runs, others, outside = [], [], []
    names = sorted(name for name in os.listdir(root) if not name.startswith("."))
    for name in names[:MAX_FOLDERS]:
        run = RunFiles(name, root / name, root)
        if not os.path.isdir(run.path):
            if os.path.islink(run.path) and not os.path.exists(run.path):
                outside.append(name)
        elif run.inside() is None:
            outside.append(name)
        elif _is_run(run.path):
            runs.append(run)
        else:
            others.append(name)
    return _Folder(runs, others, outside, max(0, len(names) - MAX_FOLDERS))


def _is_run(path: Path) -> bool:
    return any(os.path.isfile(path / name) and not os.path.islink(path / name) for name in (METRICS_FILE, JOB))


def _age(run: RunFiles) -> float:
    """A sort key: the run with the newest metrics first."""
    for name in (METRICS_FILE, JOB):
        try:
            return -os.lstat(run.path / name).st_mtime
        except OSError:
            continue
    return 0.0


def _with_unique_names(runs: list[RunFiles]) -> Iterator[RunFiles]:
    """The runs with the names of their directories; a second run of one name gets a number."""
    names = set[str]()
    for run in runs:
        plain = re.sub(r"[,\s]+", "_", as_text(run.name)) or "run"
        name, number = plain, 2
        while name in names:
            name, number = f"{plain}~{number}", number + 1
        names.add(name)
        yield run._replace(name=name)


def run_of(runs: Mapping[str, RunFiles], name: str) -> RunFiles:
    """The run of that name, which is looked up and never part of a path."""
    if name not in runs:
        raise UserError(f"there is no run {name[:60]!r}; {did_you_mean(name[:60], list(runs))}", "run.missing")
    return runs[name]


class MetricsPiece(NamedTuple):
    """The records of metrics.jsonl from an offset on."""

    records: list[Record]
    damaged: int  # lines that are not records
    file: int  # inode number: a run that resumes writes a new file
    offset: int  # the end of the last whole line that was read
    size: int
    anew: bool  # it was read from its start, since it is another file than the one asked for, or a shorter one


def metrics(run: RunFiles, file: int = 0, offset: int = 0, max_bytes: int = 0) -> MetricsPiece:
    """The records of metrics.jsonl from `offset` on if it is still that `file`, else from its start. An unfinished line
    is left for the next call. With `max_bytes`, only so many are read, from the first line that begins there."""
    path = run.inside(METRICS_FILE)
    if path is None:
        return MetricsPiece([], 0, 0, 0, 0, bool(file))
    try:
        stream = open_regular(path)
    except OSError:
        return MetricsPiece([], 0, 0, 0, 0, bool(file))
    with stream:
        status = os.fstat(stream.fileno())
        anew = file != status.st_ino or not 0 <= offset <= status.st_size
        start = 0 if anew else offset
        data = os.pread(stream.fileno(), max_bytes or MAX_PIECE_BYTES, start)
    end = data.rfind(b"\n") + 1
    if not end and len(data) >= MAX_LINE_BYTES:
        end = len(data)  # no record is so long
    position = data.find(b"\n") + 1 if max_bytes and start else 0
    records: list[Record] = []
    lines = 0
    while position < end and lines < MAX_PIECE_LINES:
        line_end = data.find(b"\n", position) + 1 or end
        if (record := from_line(data[position:line_end])) is not None:
            records.append(record)
        position, lines = line_end, lines + 1
    read_to = start + (position if lines else end)
    return MetricsPiece(records, lines - len(records), status.st_ino, read_to, status.st_size, anew)


def all_metrics(run: RunFiles, runs: int = 1) -> tuple[list[MetricsPiece], str]:
    """All of a run's metrics, or of a longer file parts that are spread evenly over it, its end included; and a
    sentence about what was not read, empty if all was. The `runs` of an answer share its limits."""
    at_most, samples = max(1, MAX_PIECES // runs), max(2, SAMPLES // runs)
    first = metrics(run)
    pieces = [first]
    if first.size > at_most * MAX_PIECE_BYTES:
        starts = [(first.size - MAX_LINE_BYTES) * number // (samples - 1) for number in range(samples)]
        pieces = [metrics(run, first.file, start, MAX_LINE_BYTES) for start in starts]
    else:
        while len(pieces) < at_most and 0 < pieces[-1].offset < pieces[-1].size:
            pieces.append(metrics(run, pieces[-1].file, pieces[-1].offset))
            if pieces[-1].offset == pieces[-2].offset:
                break  # the trainer is writing a line
    last, previous_offset = pieces[-1], pieces[-2].offset if len(pieces) > 1 else 0
    stopped = len(pieces) == at_most and previous_offset < last.offset < last.size
    last_anew = max((number for number, piece in enumerate(pieces) if piece.anew), default=0)
    pieces = pieces[last_anew:]  # those before are of another file
    if first.size > at_most * MAX_PIECE_BYTES:
        parts = f"{samples} parts of {bytes_text(MAX_LINE_BYTES)} each"
        return (
            pieces,
            f"{METRICS_FILE} has {bytes_text(first.size)}: {parts} were read, spread evenly, and the rest was not",
        )
    if stopped:
        read = f"its first {bytes_text(last.offset)} were read, with {MAX_PIECE_LINES * at_most:,} lines at most"
        return pieces, f"{METRICS_FILE} has {bytes_text(last.size)}: {read}, and the rest was not"
    return pieces, ""


# ---- run events -----------------------------------------------------------------------------------------------------
# The events of a run: starts, checkpoints, faults, stops, read from its logs and the names of its files.
#
# events(run)[0]      # {"kind": "start", "step": 0, "time": 1789651826.0, "text": "2 ranks on node-1", ...}


MAX_LOG_BYTES, MAX_LOGS = 1 << 21, 16  # bytes of each log, from its end
MAX_LINE_CHARACTERS = 2000
MAX_CHECKPOINTS, MAX_EVENTS = 100, 400  # that are listed, the newest
MAX_MANIFEST_BYTES = 1 << 26  # of all manifests
_N = r"(\d{1,18})"  # a whole number, short enough to convert
_START = re.compile(rf"={{20}} (\S+) rank {_N} of {_N} on (\S+), pid \d+(?:, start {_N})?")  # by launch/rank_log.py
_RESUMES = re.compile(rf"resumes from .*, after step {_N}\b")
_STOPPED = re.compile(rf"stopped by (.+) after step {_N}\b")
_DONE = re.compile(r"\d+ steps in [\d.]+ s; job, metrics")
_FATAL = re.compile(r"(?:error: |Fatal Python error: )(.*)")
_STEP = re.compile(rf"\bstep {{1,20}}{_N}\b")
_DISPLAYED_STEP = re.compile(rf"step {{1,20}}{_N}/")  # in the display's lines
_WATCHED_STEP = re.compile(rf"step {_N}: ")  # in notes by the watchers of a run
_NO_ORDER = (0.0, 0, 0)  # is set later
_NOTE = re.compile(r"note(?:  |: )(.*)")


class RunEvent(NamedTuple):
    kind: str  # start | restart | checkpoint | aside | fault | stop | end | note
    step: int | None  # steps that were done, if that is known
    time: float | None  # seconds since 1970
    text: str
    order: tuple[float, int, int]  # a sort key: approximate time, number of the start, place within the start
    bytes: int | None = None  # of a checkpoint


def events(run: RunFiles, left_out: list[str] | None = None) -> list[dict[str, Any]]:
    """The events of a run in the order in which they happened. Sentences about what was not read go to `left_out`."""
    left_out, in_order = [] if left_out is None else left_out, list[RunEvent]()
    for part in (_checkpoints, _log_file_events):
        try:
            in_order += part(run, left_out)
        except OSError as error:  # deleted while it is read, or not readable
            left_out.append(f"{as_text(error.filename or run.name)} cannot be read: {error.strerror}")
    in_order.sort(key=lambda event: event.order)
    if len(in_order) > MAX_EVENTS:
        left_out.append(f"{len(in_order) - MAX_EVENTS:,} earlier events are not shown")
    return [
        {name: getattr(event, name) for name in ("kind", "step", "time", "text", "bytes")}
        for event in in_order[-MAX_EVENTS:]
    ]


def signature(run: RunFiles) -> str:
    """A text that changes when there may be new events."""
    parts = []
    for name in ("checkpoints", "checkpoints/latest", "logs", "logs/rank-0.log"):
        try:
            status = os.lstat(run.path / name)
        except OSError:
            parts.append("")
            continue
        size_only = name == "logs/rank-0.log"
        parts.append(f"{status.st_size:x}" if size_only else f"{status.st_mtime_ns:x}.{status.st_size:x}")
    return "-".join(parts)


def _checkpoints(run: RunFiles, left_out: list[str]) -> Iterator[RunEvent]:
    """The events of complete checkpoints, and of those that were set aside."""
    folder = run.inside("checkpoints")
    if folder is None or not folder.is_dir():
        return
    store, bytes_left = Store(folder), MAX_MANIFEST_BYTES
    complete = store.complete()
    if len(complete) > MAX_CHECKPOINTS:
        left_out.append(f"{len(complete) - MAX_CHECKPOINTS:,} earlier checkpoints are not listed")
    for checkpoint in complete[:MAX_CHECKPOINTS]:
        name = str(getattr(checkpoint.path, "name", ""))
        if run.inside("checkpoints", name, MANIFEST) is None:
            continue
        status = os.lstat(folder / name / MANIFEST)
        time, bytes_left = status.st_mtime, bytes_left - status.st_size
        text, size = _describe(checkpoint) if bytes_left >= 0 else ("its manifest is too long to read here", None)
        yield RunEvent("checkpoint", checkpoint.step, time, text, (time, -1, 0), size)
    for aside in store.set_aside_folders():
        path = folder / str(aside.name)
        time, step = os.lstat(path).st_mtime, re.search(rf"step-{_N}\b", path.name)
        word = next((word for word in ("damaged", "suspect") if f".{word}" in path.name), "incomplete")
        text = f"{as_text(path.name)}: {'an' if word == 'incomplete' else 'a'} {word} checkpoint, set aside"
        yield RunEvent("aside", int(step[1]) if step else None, time, text, (time, -1, 0))


def _describe(checkpoint: Checkpoint) -> tuple[str, int | None]:
    """A checkpoint's text and its bytes; what is wrong with its manifest and None if that cannot be read."""
    try:
        return plural(len(checkpoint.manifest.files), "file"), checkpoint.bytes
    except UserError as error:
        return as_text(error.problems[0].replace(str(checkpoint.path), checkpoint.path.name)), None


def _log_file_events(run: RunFiles, left_out: list[str]) -> Iterator[RunEvent]:
    """The events in the logs of the first ranks."""
    folder = run.inside("logs")
    if folder is None or not folder.is_dir():
        return
    ranks = sorted(
        int(match[1]) for name in os.listdir(folder) if (match := re.fullmatch(r"rank-(\d{1,7})\.log", name))
    )
    if len(ranks) > MAX_LOGS:
        left_out.append(f"logs of {len(ranks) - MAX_LOGS:,} more ranks are not read")
    for rank in ranks[:MAX_LOGS]:
        text, modified = _log_end(run, f"rank-{rank}.log", left_out)
        yield from _log_events(text, rank, modified)


def _log_end(run: RunFiles, name: str, left_out: list[str]) -> tuple[str, float]:
    """The end of a log, and when it was last written; empty and 0 if it cannot be read."""
    path = run.inside("logs", name)
    try:
        if path is None:
            return "", 0.0
        with open_regular(path) as stream:
            status = os.fstat(stream.fileno())
            data = os.pread(stream.fileno(), MAX_LOG_BYTES, max(0, status.st_size - MAX_LOG_BYTES))
            if status.st_size > MAX_LOG_BYTES:
                left_out.append(
                    f"logs/{name} has {bytes_text(status.st_size)}: its last {bytes_text(MAX_LOG_BYTES)} were read"
                )
            return data.decode(errors="replace"), status.st_mtime
    except OSError:
        return "", 0.0


def _log_events(text: str, rank: int, modified: float) -> Iterator[RunEvent]:
    """The events of a log that was last written at `modified`. Only the headers have a time: events that end a start
    are sorted right before the next header."""
    lines = [line[:MAX_LINE_CHARACTERS] for line in text.splitlines()]
    headers = {number: header for number, line in enumerate(lines) if (header := _START.match(line))}
    start_times = [_seconds(header[1]) for header in headers.values()]
    end_times, end_lines = [*start_times[1:], modified], [*list(headers)[1:], len(lines)]
    start, step, in_traceback = -1, None, False  # start: the number of the header above the line
    for number, line in enumerate(lines):
        if header := headers.get(number):
            start, step, in_traceback = start + 1, None, False
            if rank == 0:
                resumes = (_RESUMES.match(following) for following in lines[number + 1 : end_lines[start]])
                yield _start_event(header, start_times[start], start, next((match for match in resumes if match), None))
            continue
        began, ended = (start_times[start], end_times[start]) if start >= 0 else (modified, modified)
        if displayed := _DISPLAYED_STEP.match(line):
            step = int(displayed[1])
        for event in _line_events(line, rank, step, in_traceback):
            order = (began, start, 1) if event.kind == "note" else (ended, start, 2)
            ends_the_log = event.kind in ("stop", "end") and start == len(start_times) - 1
            yield event._replace(order=order, time=modified if ends_the_log else None)
        in_traceback = (in_traceback and line.startswith(" ")) or line.startswith("Traceback (most recent call last)")


def _start_event(header: re.Match[str], time: float, start: int, resumed: re.Match[str] | None) -> RunEvent:
    """The event of the `start`-th header of a log; `resumed` is the line that says after which step it resumes."""
    number = int(header[5] or 1)
    restarted = number > 1 or start > 0
    step = None if restarted else 0
    where = f"{plural(int(header[3]), 'rank')}, rank 0 on {header[4]}"
    if resumed:
        restarted, step, where = True, int(resumed[1]), f"resumes after step {resumed[1]}; {where}"
    return RunEvent("restart" if restarted else "start", step, time, where, (time, start, 0))


def _line_events(line: str, rank: int, step: int | None, in_traceback: bool) -> Iterator[RunEvent]:
    """The event that a line of a log tells, if any."""
    if match := _STOPPED.match(line):
        yield RunEvent("stop", int(match[2]), None, f"stopped by {match[1]}", _NO_ORDER)
    elif _DONE.match(line):
        yield RunEvent("end", step, None, line.partition(";")[0], _NO_ORDER)
    elif match := _FATAL.match(line):
        named_step = _STEP.search(line)
        yield RunEvent("fault", int(named_step[1]) if named_step else step, None, _with_rank(rank, match[1]), _NO_ORDER)
    elif in_traceback and line.strip() and not line.startswith(" "):
        yield RunEvent("fault", step, None, _with_rank(rank, line), _NO_ORDER)
    elif match := _NOTE.match(line):
        by_watcher = _WATCHED_STEP.match(match[1])
        yield RunEvent("note", int(by_watcher[1]) if by_watcher else step, None, match[1].strip(), _NO_ORDER)


def _with_rank(rank: int, sentence: str) -> str:
    short = sentence.strip()[:300]
    return short if f"rank {rank}" in short else f"rank {rank}: {short}"


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0
