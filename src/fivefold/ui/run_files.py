"""The runs of the directories that the user gave, and what may be read of them. Nothing outside is opened.

found, notes = runs_in((Path("/home/me/runs"),))
found["demo"].path, notes           # a directory that is no run has a sentence
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.support.documents import parse_json, parse_toml, parsing
from fivefold.support.errors import UserError
from fivefold.support.files import open_regular, read_regular
from fivefold.support.formatting import bytes_text, counted, did_you_mean
from fivefold.train.metrics import Record, from_line

METRICS, JOB, ENVIRONMENT = "metrics.jsonl", "job.toml", "environment.json"
MOST = {JOB: 1 << 16, ENVIRONMENT: 1 << 20}  # bytes
AT_ONCE, LINES = 1 << 24, 1 << 16  # bytes and lines of metrics in one answer: a page asks for the rest
LONGEST = 1 << 22  # bytes of a line; one that has more is damaged
PIECES, WINDOWS = 8, 16  # answers of metrics that are read as a whole; of longer ones, so many parts of LONGEST bytes
RUNS, FOLDERS = 200, 5000  # that are listed, and that are looked into


class Run(NamedTuple):
    name: str  # by which a page asks for it
    path: Path
    root: Path  # the directory that was given

    def inside(self, *parts: str) -> Path | None:
        """A path of it, if it lies in the directory that was given wherever its links lead."""
        path = self.path.joinpath(*parts)
        try:
            return path if path.resolve().is_relative_to(self.root) else None
        except (OSError, RuntimeError):
            return None

    def table(self, name: str, left: list[str] | None = None) -> dict[str, Any]:
        """job.toml or environment.json as plain data; empty where there is none that can be read. `left` gets why."""
        path, left = self.inside(name), [] if left is None else left
        if path is None:
            return {}
        try:
            with parsing(name, "a table"):
                text = read_regular(path, MOST[name]).decode()
                table = parse_toml(text) if name.endswith(".toml") else parse_json(text)
        except FileNotFoundError:
            return {}
        except (OSError, UserError) as error:
            left.append(f"{name} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error))
            return {}
        return table if isinstance(table, dict) else {}


def runs_in(roots: tuple[Path, ...]) -> tuple[dict[str, Run], list[str]]:
    """Every run by its name, those with the newest metrics first; and what is to be said of the rest."""
    found: list[Run] = []
    notes: list[str] = []
    for root in map(Path.resolve, roots):
        try:
            mine, others, away, beyond = _below(root)
        except OSError as error:  # it was there when the server started
            notes.append(f"{told(root)} cannot be read: {error.strerror}")
            continue
        found += mine
        if not mine:
            notes.append(f"{told(root)} is no run and has none in it: a run has {METRICS} or {JOB}")
        elif others:
            notes.append(f"{counted(len(others), 'folder')} of {told(root)} without {METRICS}: {_few(others)}")
        if away:
            notes.append(
                f"{_few(away)} of {told(root)} lead out of it, and are left alone; "
                "`fivefold ui --runs PLACE` reads another place"
            )
        if beyond:
            notes.append(f"{told(root)} has {beyond:,} names more than the {FOLDERS:,} that are looked at")
    found.sort(key=_age)
    if len(found) > RUNS:
        notes.append(f"{len(found) - RUNS} older runs are not listed")
    return {run.name: run for run in _named(found[:RUNS])}, notes


def _few(names: list[str]) -> str:
    return ", ".join(map(told, names[:5])) + (" ..." if len(names) > 5 else "")


def told(path: Path | str) -> str:
    """As text that can be sent: a name on a disk is any bytes."""
    return os.fsencode(path).decode(errors="replace")


def _below(root: Path) -> tuple[list[Run], list[str], list[str], int]:
    """The runs of a directory, which may be one itself; other directories; links that lead out of it, or nowhere; and
    how many names were not looked at."""
    if _is_run(root):
        return [Run(root.name, root, root)], [], [], 0
    runs, others, away = [], [], []
    names = sorted(name for name in os.listdir(root) if not name.startswith("."))
    for name in names[:FOLDERS]:
        run = Run(name, root / name, root)
        if not os.path.isdir(run.path):
            away += [name] if os.path.islink(run.path) and not os.path.exists(run.path) else []
        elif run.inside() is None:
            away.append(name)
        elif _is_run(run.path):
            runs.append(run)
        else:
            others.append(name)
    return runs, others, away, max(0, len(names) - FOLDERS)


def _is_run(path: Path) -> bool:
    return any(os.path.isfile(path / name) and not os.path.islink(path / name) for name in (METRICS, JOB))


def _age(run: Run) -> float:
    """The newest first."""
    for name in (METRICS, JOB):
        try:
            return -os.lstat(run.path / name).st_mtime
        except OSError:
            continue
    return 0.0


def _named(runs: list[Run]) -> Iterator[Run]:
    """Names are those of the directories; a second one of a name gets a number."""
    taken = set[str]()
    for run in runs:
        plain = re.sub(r"[,\s]+", "_", told(run.name)) or "run"
        name, number = plain, 2
        while name in taken:
            name, number = f"{plain}~{number}", number + 1
        taken.add(name)
        yield run._replace(name=name)


def run_of(runs: Mapping[str, Run], name: str) -> Run:
    """By its name, which is looked up and never part of a path."""
    if name not in runs:
        raise UserError(f"there is no run {name[:60]!r}; {did_you_mean(name[:60], list(runs))}")
    return runs[name]


class Piece(NamedTuple):
    """Metrics from an offset on."""

    records: list[Record]
    damaged: int  # lines that are not what was written
    file: int  # its number: a run that resumes writes a new one
    offset: int  # behind the last whole line
    size: int
    anew: bool  # it is another file than the one that was asked for, or a shorter one, and was read from its start


def metrics(run: Run, file: int = 0, offset: int = 0, most: int = 0) -> Piece:
    """What metrics.jsonl has from `offset` on, if it is still that `file`; half a line at the end waits. With `most`,
    from the first line on that begins there, in so many bytes."""
    path = run.inside(METRICS)
    if path is None:
        return Piece([], 0, 0, 0, 0, bool(file))
    try:
        stream = open_regular(path)
    except OSError:
        return Piece([], 0, 0, 0, 0, bool(file))
    with stream:
        known = os.fstat(stream.fileno())
        anew = file != known.st_ino or not 0 <= offset <= known.st_size
        start = 0 if anew else offset
        data = os.pread(stream.fileno(), most or AT_ONCE, start)
    end = data.rfind(b"\n") + 1
    if not end and len(data) >= LONGEST:
        end = len(data)  # no record is so long
    at = data.find(b"\n") + 1 if most and start else 0
    sound: list[Record] = []
    lines = 0
    while at < end and lines < LINES:
        stop = data.find(b"\n", at) + 1 or end
        record = from_line(data[at:stop])
        sound += [record] if record is not None else []
        at, lines = stop, lines + 1
    return Piece(sound, lines - len(sound), known.st_ino, start + (at if lines else end), known.st_size, anew)


def every_metric(run: Run) -> tuple[list[Piece], str]:
    """All of a run's metrics, or of a longer file parts that are spread evenly over it, and its end; and what is to be
    said of the rest."""
    first = metrics(run)
    pieces = [first]
    if first.size > PIECES * AT_ONCE:
        starts = [(first.size - LONGEST) * number // (WINDOWS - 1) for number in range(WINDOWS)]
        pieces = [metrics(run, first.file, start, LONGEST) for start in starts]
    else:
        while len(pieces) < PIECES and 0 < pieces[-1].offset < pieces[-1].size:
            pieces.append(metrics(run, pieces[-1].file, pieces[-1].offset))
            if pieces[-1].offset == pieces[-2].offset:
                break  # the trainer is writing a line
    last, stopped = pieces[-1], len(pieces) == PIECES and pieces[-2].offset < pieces[-1].offset < pieces[-1].size
    anew = max((at for at, piece in enumerate(pieces) if piece.anew), default=0)
    pieces = pieces[anew:]
    if first.size > PIECES * AT_ONCE:
        of = f"{WINDOWS} parts of {bytes_text(LONGEST)} each"
        return pieces, f"{METRICS} has {bytes_text(first.size)}: {of} were read, spread evenly, and the rest was not"
    if stopped:
        read = f"its first {bytes_text(last.offset)} were read, with {LINES * PIECES:,} lines at most"
        return pieces, f"{METRICS} has {bytes_text(last.size)}: {read}, and the rest was not"
    return pieces, ""
