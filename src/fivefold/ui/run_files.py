"""The runs of the directories that the user gave, and what may be read of them. Nothing outside is opened.

found, notes = runs_in((Path("/home/me/runs"),))
found["demo"].path, notes           # a directory that is no run has a sentence
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fivefold.support.documents import parse_toml
from fivefold.support.errors import UserError
from fivefold.support.files import open_regular, read_regular
from fivefold.support.formatting import counted, did_you_mean
from fivefold.train.metrics import Record, from_line

METRICS, JOB, ENVIRONMENT = "metrics.jsonl", "job.toml", "environment.json"
MOST = 1 << 20  # bytes of a job or an environment
AT_ONCE = 1 << 24  # bytes of metrics in one answer: a page asks for the rest
LONGEST = 1 << 22  # bytes of a line; one that has more is damaged
RUNS = 200  # that are listed


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

    def table(self, name: str) -> dict[str, Any]:
        """job.toml or environment.json as plain data; empty where there is none that can be read."""
        path = self.inside(name)
        if path is None:
            return {}
        try:
            text = read_regular(path, MOST).decode()
            table = parse_toml(text) if name.endswith(".toml") else msgspec.json.decode(text)
        except (OSError, ValueError, UserError, RecursionError):
            return {}
        return table if isinstance(table, dict) else {}


def runs_in(roots: tuple[Path, ...]) -> tuple[dict[str, Run], list[str]]:
    """Every run by its name, those with the newest metrics first; and what is to be said of the rest."""
    found: list[Run] = []
    notes: list[str] = []
    for root in map(Path.resolve, roots):
        try:
            mine, others, away = _below(root)
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
    found.sort(key=_age)
    if len(found) > RUNS:
        notes.append(f"{len(found) - RUNS} older runs are not listed")
    return {run.name: run for run in _named(found[:RUNS])}, notes


def _few(names: list[str]) -> str:
    return ", ".join(map(told, names[:5])) + (" ..." if len(names) > 5 else "")


def told(path: Path | str) -> str:
    """As text that can be sent: a name on a disk is any bytes."""
    return os.fsencode(path).decode(errors="replace")


def _below(root: Path) -> tuple[list[Run], list[str], list[str]]:
    """The runs of a directory, which may be one itself; other directories; and links that lead out of it."""
    if _is_run(root):
        return [Run(root.name, root, root)], [], []
    runs, others, away = [], [], []
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            path = Path(entry.path)
            if not path.resolve().is_relative_to(root):
                away.append(entry.name)
            elif _is_run(path):
                runs.append(Run(entry.name, path, root))
            else:
                others.append(entry.name)
    return runs, others, away


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


def metrics(run: Run, file: int = 0, offset: int = 0) -> Piece:
    """What metrics.jsonl has from `offset` on, if it is still that `file`; half a line at the end waits."""
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
        data = os.pread(stream.fileno(), AT_ONCE, start)
    end = data.rfind(b"\n") + 1
    if not end and len(data) > LONGEST:
        end = len(data)  # no record is so long
    records = [from_line(line) for line in data[:end].splitlines(keepends=True)]
    sound = [record for record in records if record is not None]
    return Piece(sound, len(records) - len(sound), known.st_ino, start + end, known.st_size, anew)
