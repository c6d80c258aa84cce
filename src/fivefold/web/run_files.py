"""The runs of the directories that the user gave, and what may be read of them. Nothing outside is opened.

runs, notes = runs_in((Path("/home/me/runs"),))
runs["demo"].path, notes           # a directory that is not a run has a sentence
"""

import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.checkpoint.store import MANIFEST, Checkpoint, Store
from fivefold.support.errors import UserError
from fivefold.support.files import open_regular, read_regular
from fivefold.support.parsing import parse_json, parse_toml, parsing
from fivefold.support.text import bytes_text, counted, did_you_mean
from fivefold.trainer.records import METRICS, Record, from_line

JOB, ENVIRONMENT = "job.toml", "environment.json"
MOST = {JOB: 1 << 16, ENVIRONMENT: 1 << 20}  # bytes
AT_ONCE, LINES = 1 << 24, 1 << 16  # bytes and lines of metrics in one answer: a page asks for the rest
LONGEST = 1 << 22  # bytes of a line; one that has more is damaged
PIECES, WINDOWS = 8, 16  # answers of metrics that are read as a whole; of longer ones, so many parts of LONGEST bytes
RUNS, FOLDERS = 200, 5000  # that are listed, and that are looked into


class RunFiles(NamedTuple):
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


def runs_in(roots: tuple[Path, ...]) -> tuple[dict[str, RunFiles], list[str]]:
    """Every run by its name, those with the newest metrics first; and what is to be said of the rest."""
    runs: list[RunFiles] = []
    notes: list[str] = []
    for root in map(Path.resolve, roots):
        try:
            below, others, away, beyond = _below(root)
        except OSError as error:  # it was there when the server started
            notes.append(f"{as_text(root)} cannot be read: {error.strerror}")
            continue
        runs += below
        if not below:
            notes.append(f"{as_text(root)} is not a run and has none in it: a run has {METRICS} or {JOB}")
        elif others:
            notes.append(f"{counted(len(others), 'folder')} of {as_text(root)} without {METRICS}: {_few(others)}")
        if away:
            notes.append(
                f"{_few(away)} of {as_text(root)} lead out of it, and are left alone; "
                "`fivefold ui --runs PLACE` reads another place"
            )
        if beyond:
            notes.append(f"{as_text(root)} has {beyond:,} names more than the {FOLDERS:,} that are looked at")
    runs.sort(key=_age)
    if len(runs) > RUNS:
        notes.append(f"{len(runs) - RUNS} older runs are not listed")
    return {run.name: run for run in _named(runs[:RUNS])}, notes


def _few(names: list[str]) -> str:
    return ", ".join(map(as_text, names[:5])) + (" ..." if len(names) > 5 else "")


def as_text(path: Path | str) -> str:
    """As text that can be sent: a name on a disk is any bytes."""
    return os.fsencode(path).decode(errors="replace")


def _below(root: Path) -> tuple[list[RunFiles], list[str], list[str], int]:
    """The runs of a directory, which may be one itself; other directories; links that lead out of it, or nowhere; and
    how many names were not looked at."""
    if _is_run(root):
        return [RunFiles(root.name, root, root)], [], [], 0
    runs, others, away = [], [], []
    names = sorted(name for name in os.listdir(root) if not name.startswith("."))
    for name in names[:FOLDERS]:
        run = RunFiles(name, root / name, root)
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


def _age(run: RunFiles) -> float:
    """The newest first."""
    for name in (METRICS, JOB):
        try:
            return -os.lstat(run.path / name).st_mtime
        except OSError:
            continue
    return 0.0


def _named(runs: list[RunFiles]) -> Iterator[RunFiles]:
    """Names are those of the directories; a second one of a name gets a number."""
    taken = set[str]()
    for run in runs:
        plain = re.sub(r"[,\s]+", "_", as_text(run.name)) or "run"
        name, number = plain, 2
        while name in taken:
            name, number = f"{plain}~{number}", number + 1
        taken.add(name)
        yield run._replace(name=name)


def run_of(runs: Mapping[str, RunFiles], name: str) -> RunFiles:
    """By its name, which is looked up and never part of a path."""
    if name not in runs:
        raise UserError(f"there is no run {name[:60]!r}; {did_you_mean(name[:60], list(runs))}")
    return runs[name]


class MetricsPiece(NamedTuple):
    """Metrics from an offset on."""

    records: list[Record]
    damaged: int  # lines that are not what was written
    file: int  # its number: a run that resumes writes a new one
    offset: int  # behind the last whole line
    size: int
    anew: bool  # it is another file than the one that was asked for, or a shorter one, and was read from its start


def metrics(run: RunFiles, file: int = 0, offset: int = 0, most: int = 0) -> MetricsPiece:
    """What metrics.jsonl has from `offset` on, if it is still that `file`; half a line at the end waits. With `most`,
    from the first line on that begins there, in so many bytes."""
    path = run.inside(METRICS)
    if path is None:
        return MetricsPiece([], 0, 0, 0, 0, bool(file))
    try:
        stream = open_regular(path)
    except OSError:
        return MetricsPiece([], 0, 0, 0, 0, bool(file))
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
    return MetricsPiece(sound, lines - len(sound), known.st_ino, start + (at if lines else end), known.st_size, anew)


def all_metrics(run: RunFiles, runs: int = 1) -> tuple[list[MetricsPiece], str]:
    """All of a run's metrics, or of a longer file parts that are spread evenly over it, and its end; and what is to be
    said of the rest. What one answer reads is shared by all of its `runs`."""
    at_most, windows = max(1, PIECES // runs), max(2, WINDOWS // runs)
    first = metrics(run)
    pieces = [first]
    if first.size > at_most * AT_ONCE:
        starts = [(first.size - LONGEST) * number // (windows - 1) for number in range(windows)]
        pieces = [metrics(run, first.file, start, LONGEST) for start in starts]
    else:
        while len(pieces) < at_most and 0 < pieces[-1].offset < pieces[-1].size:
            pieces.append(metrics(run, pieces[-1].file, pieces[-1].offset))
            if pieces[-1].offset == pieces[-2].offset:
                break  # the trainer is writing a line
    last, before = pieces[-1], pieces[-2].offset if len(pieces) > 1 else 0
    stopped = len(pieces) == at_most and before < last.offset < last.size
    anew = max((at for at, piece in enumerate(pieces) if piece.anew), default=0)
    pieces = pieces[anew:]
    if first.size > at_most * AT_ONCE:
        of = f"{windows} parts of {bytes_text(LONGEST)} each"
        return pieces, f"{METRICS} has {bytes_text(first.size)}: {of} were read, spread evenly, and the rest was not"
    if stopped:
        read = f"its first {bytes_text(last.offset)} were read, with {LINES * at_most:,} lines at most"
        return pieces, f"{METRICS} has {bytes_text(last.size)}: {read}, and the rest was not"
    return pieces, ""


# ---- run events -----------------------------------------------------------------------------------------------------
# The life of a run, as its directory tells it: starts, checkpoints, faults, stops. Logs and names are read, no tensor.
#
# events(run)[0]      # {"kind": "start", "step": 0, "time": 1789651826.0, "text": "2 ranks on node-1", ...}


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


class RunEvent(NamedTuple):
    kind: str  # start | restart | checkpoint | aside | fault | stop | end | note
    step: int | None  # steps that were done, where that is known
    time: float | None  # seconds since 1970
    text: str
    order: tuple[float, int, int]  # about when, in which start of the run, and where in it
    bytes: int | None = None  # of a checkpoint


def events(run: RunFiles, left: list[str] | None = None) -> list[dict[str, Any]]:
    """In the order in which they happened. `left` gets what is to be said of what was not read."""
    left, in_order = [] if left is None else left, list[RunEvent]()
    for part in (_checkpoints, _logged):
        try:
            in_order += part(run, left)
        except OSError as error:  # it goes while it is read, or is not for this user
            left.append(f"{as_text(error.filename or run.name)} cannot be read: {error.strerror}")
    in_order.sort(key=lambda event: event.order)
    if len(in_order) > EVENTS:
        left.append(f"{len(in_order) - EVENTS:,} earlier events are not shown")
    return [
        {name: getattr(event, name) for name in ("kind", "step", "time", "text", "bytes")}
        for event in in_order[-EVENTS:]
    ]


def signature(run: RunFiles) -> str:
    """Another one when there may be new events."""
    parts = []
    for name in ("checkpoints", "checkpoints/latest", "logs", "logs/rank-0.log"):
        try:
            known = os.lstat(run.path / name)
            parts.append(
                f"{known.st_mtime_ns:x}.{known.st_size:x}" if name != "logs/rank-0.log" else f"{known.st_size:x}"
            )
        except OSError:
            parts.append("")
    return "-".join(parts)


def _checkpoints(run: RunFiles, left: list[str]) -> Iterator[RunEvent]:
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
        yield RunEvent("checkpoint", checkpoint.step, time, text, (time, -1, 0), size)
    for aside in store.aside():
        path = folder / str(aside.name)
        time, step = os.lstat(path).st_mtime, re.search(rf"step-{_N}\b", path.name)
        word = next((word for word in ("damaged", "suspect") if f".{word}" in path.name), "incomplete")
        text = f"{as_text(path.name)}: {'an' if word == 'incomplete' else 'a'} {word} checkpoint, set aside"
        yield RunEvent("aside", int(step[1]) if step else None, time, text, (time, -1, 0))


def _described(checkpoint: Checkpoint) -> tuple[str, int | None]:
    try:
        return counted(len(checkpoint.manifest.files), "file"), checkpoint.bytes
    except UserError as error:
        return as_text(error.problems[0].replace(str(checkpoint.path), checkpoint.path.name)), None


def _logged(run: RunFiles, left: list[str]) -> Iterator[RunEvent]:
    folder = run.inside("logs")
    if folder is None or not folder.is_dir():
        return
    ranks = sorted(
        int(match[1]) for name in os.listdir(folder) if (match := re.fullmatch(r"rank-(\d{1,7})\.log", name))
    )
    if len(ranks) > RANKS:
        left.append(f"logs of {len(ranks) - RANKS:,} more ranks are not read")
    for rank in ranks[:RANKS]:
        text, last = _end_of(run, f"rank-{rank}.log", left)
        yield from _of_log(text, rank, last)


def _end_of(run: RunFiles, name: str, left: list[str]) -> tuple[str, float]:
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


def _of_log(text: str, rank: int, last: float) -> Iterator[RunEvent]:
    """Each start has a header with its time; what ends it has none, and is sorted before the next header."""
    lines = [line[:WIDE] for line in text.splitlines()]
    headers = {number: header for number, line in enumerate(lines) if (header := _START.match(line))}
    times = [_seconds(header[1]) for header in headers.values()]
    ends, after = [*times[1:], last], [*list(headers)[1:], len(lines)]
    at, step, traceback = -1, None, False
    for number, line in enumerate(lines):
        if header := headers.get(number):
            at, step, traceback = at + 1, None, False
            if rank == 0:
                resumes = (_RESUMES.match(lines[later]) for later in range(number + 1, after[at]))
                yield _started(header, times[at], at, next((match for match in resumes if match), None))
            continue
        end, begin = (ends[at], times[at]) if at >= 0 else (last, last)
        if at_step := _AT_STEP.match(line):
            step = int(at_step[1])
        for event in _of_line(line, rank, step, traceback):
            moment = (begin, at, 1) if event.kind == "note" else (end, at, 2)
            yield event._replace(
                order=moment, time=last if event.kind in ("stop", "end") and at == len(times) - 1 else None
            )
        traceback = (traceback and line.startswith(" ")) or line.startswith("Traceback (most recent call last)")


def _started(header: re.Match[str], time: float, at: int, resumed: re.Match[str] | None) -> RunEvent:
    number = int(header[5] or 1)
    step = int(resumed[1]) if resumed else 0 if at == 0 and number == 1 else None
    where = f"{counted(int(header[3]), 'rank')}, rank 0 on {header[4]}"
    again = f"resumes after step {resumed[1]}; " if resumed else ""
    return RunEvent("restart" if number > 1 or at > 0 or resumed else "start", step, time, again + where, (time, at, 0))


def _of_line(line: str, rank: int, step: int | None, traceback: bool) -> Iterator[RunEvent]:
    if match := _STOPPED.match(line):
        yield RunEvent("stop", int(match[2]), None, f"stopped by {match[1]}", _LATER)
    elif _DONE.match(line):
        yield RunEvent("end", step, None, line.partition(";")[0], _LATER)
    elif match := _FATAL.match(line):
        named_step = _STEP.search(line)
        yield RunEvent("fault", int(named_step[1]) if named_step else step, None, _with_rank(rank, match[1]), _LATER)
    elif traceback and line.strip() and not line.startswith(" "):
        yield RunEvent("fault", step, None, _with_rank(rank, line), _LATER)
    elif match := _NOTE.match(line):
        by_watcher = _SAID.match(match[1])
        yield RunEvent("note", int(by_watcher[1]) if by_watcher else step, None, match[1].strip(), _LATER)


def _with_rank(rank: int, sentence: str) -> str:
    short = sentence.strip()[:300]
    return short if f"rank {rank}" in short else f"rank {rank}: {short}"


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0


# ---- run sent -------------------------------------------------------------------------------------------------------
# A run's page as others get it: without the places and the names of the machines that it was made on.
#
# shareable(answered_view("run", Ask({}, (Path("runs/demo"),))))


# Where a path begins: at a root, a drive, a share, a home, or a URL that names a file of a machine. A slash within a
# word ("tokens/s", "runs/demo") begins none, but for that of an option ("-I/usr/include").
_URL = r"\b(?:file|ssh|scp|sftp|smb|nfs|hdfs):(?://[^\s/'\"]*)?(?=[/\\])"
_ROOT = r"(?:(?<![\w.~/:\\])|(?<=\s-\w)|(?<=\A-\w))/+|(?<=:)/(?![/\s])"
_HOME, _DRIVE, _SHARE = r"(?<!\w)~(?:[A-Za-z_][\w.-]*)?[/\\]+", r"(?<!\w)[A-Za-z]:(?:\\+|/(?!/))", r"(?<![\w\\])\\\\+"
_BEGINS = rf"(?i:{_URL})[/\\]+|{_HOME}|{_DRIVE}|{_SHARE}|{_ROOT}"
# A name in the middle: punctuation and up to five blanks may be in it, if a separator comes behind. Numbers and units
# before a slash are no names: "1/200", "tokens/s".
_WORD = r"(?:[^\s/\\:;,'\"()\[\]{}<>|]|[:;,'\"(\[{<>|](?=[\w.-])|[)\]}](?=[\w./\\-]))+"
_UNIT = r"(?<!\s\d)(?<!\s(?:it|or|\d\d|[kKMGT]B))(?<!\s(?:and|\d\d\d|[KMGT]iB))(?<!tokens)(?<!samples)(?<!steps)"
_BETWEEN = rf"(?:{_WORD}(?:[ ](?!-){_WORD}){{0,5}}{_UNIT}[/\\]+)"
_LAST = r"[^\s/\\:;,'\"()\[\]{}<>|]*"
_PATH = re.compile(rf"(?P<begins>{_BEGINS})(?P<between>{_BETWEEN}*)(?P<last>{_LAST})")
_QUOTED = re.compile(rf"(?P<quote>['\"`])(?P<path>(?:{_BEGINS})[^'\"`\n]*)(?P=quote)")
_WHOLE = re.compile(rf"(?:{_BEGINS})[^\n]*")
_SENTENCE = re.compile(r"[:;,]\s")
_LONGEST_PATH, _DEEPEST = 4096, 64  # characters, and folders that are looked for in texts
_SENTENCES = (
    "text",
    "command",
    "left_out",
)  # keys of sentences; what begins as a path elsewhere is one, whatever is in it
_HOMES = re.compile(r"(?i)(?:/home|/users|[a-z]:[\\/]+users)[\\/]+[^\\/]+[\\/]*")
_ALONE = re.compile(r"/[^/\\]*")  # a name at the root is no place: "/s", "/ 2"
_LOGIN = re.compile(r"(?<=://)[^\s/@]+@")
_HOST = re.compile(r"\brank \d+ on (\S+)")  # in the text of a start (`_started`)


def shareable(view: dict[str, Any]) -> dict[str, Any]:
    """The same view: of a path its last part is left, and of a host nothing. What a log says beyond that stays."""
    page = view["payload"]
    texts = [event["text"] for run in page["shown"] for event in run["events"]]
    hosts = {host for text in texts for host in _HOST.findall(text)}
    places = _places([[run["directory"], run["job"], run["environment"]] for run in page["shown"]])
    shown = [
        run | {"events": [event | {"text": _unnamed(_nearer(event["text"], places), hosts)} for event in run["events"]]}
        for run in page["shown"]
    ]
    parts = {"parts": without_paths(view["parts"])} if "parts" in view else {}
    return view | {"payload": without_paths(page | {"shown": shown, "notes": []})} | parts


def without_paths(value: Any, may_be_sentence: bool = True) -> Any:
    """Every text of it, in which a path is its last part. `said`: texts may be sentences."""
    if isinstance(value, str):
        return _scrubbed(value, may_be_sentence) if "/" in value or "\\" in value else value
    if isinstance(value, dict):
        return {without_paths(name, False): without_paths(inner, name in _SENTENCES) for name, inner in value.items()}
    return [without_paths(inner, may_be_sentence) for inner in value] if isinstance(value, list | tuple) else value


def _scrubbed(text: str, may_be_sentence: bool) -> str:
    text = _LOGIN.sub("", text)
    if _WHOLE.fullmatch(text) and not _ALONE.fullmatch(text) and not (may_be_sentence and _SENTENCE.search(text)):
        return _last(text)  # blanks are its own
    text = _QUOTED.sub(lambda match: match["quote"] + _last(match["path"]) + match["quote"], text)
    return _PATH.sub(_left, text)


def _left(match: re.Match[str]) -> str:
    return match[0] if _ALONE.fullmatch(match[0]) else _last(match[0])


def _last(path: str) -> str:
    """The last part; of a directory with a separator behind it, and of somebody's home, nothing."""
    name = re.split(r"[/\\]", path)[-1]
    return "..." if not name or _HOMES.fullmatch(re.sub(r"(?i)^file:(//[^/]*)?", "", path)) else name


def _places(value: Any) -> list[str]:
    """Every text that is a path as a whole, and the folders above it, the longest first. What is longer than any path
    of Linux is none, and of a deep one the upper folders are enough: a file is not to fill the memory with them."""
    if isinstance(value, dict | list):
        places = {place for inner in (value.values() if isinstance(value, dict) else value) for place in _places(inner)}
        return sorted(places, key=len, reverse=True)
    if not isinstance(value, str) or len(value) > _LONGEST_PATH or not _WHOLE.fullmatch(value):
        return []
    parts = value.split("/")[:_DEEPEST]
    return ["/".join(parts[:count]) for count in range(len(parts), 2, -1)]


def _nearer(text: str, places: list[str]) -> str:
    """With a plain name for the folders that are known: theirs may have any characters."""
    for place in places:
        text = re.sub(rf"(?<![\w.~/]){re.escape(place)}/+", "/-/", text) if place in text else text
    return text


def _unnamed(text: str, hosts: set[str]) -> str:
    text = re.sub(r", rank 0 on \S+$", "", text)
    for host in hosts:
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", "its host", text)
    return text
