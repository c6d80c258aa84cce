"""The Run view: training runs of the directories that `fivefold ui --runs` names, while they train and afterwards.

payload(Ask({}, runs=(Path("runs"),)))                          # all runs, and the newest in full
payload(Ask({"runs": "demo,demo-2"}, runs=...))                 # these
tail(Ask({"run": "demo", "file": "81", "offset": "9000"}, runs=...))     # what has come since
trace(Ask({"run": "demo", "step": "6"}, runs=...))              # its lanes, measured and simulated

Records are those of metrics.jsonl as the trainer wrote them. A long run's curves are thinned, and say so.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError
from fivefold.tracing.chrome import lanes
from fivefold.trainer.records import METRICS, Evaluation, Record, Step
from fivefold.web.question import Ask
from fivefold.web.run_files import (
    ENVIRONMENT,
    JOB,
    MetricsPiece,
    RunFiles,
    all_metrics,
    as_text,
    events,
    metrics,
    run_of,
    runs_in,
    signature,
)

COLUMNS = ("step", "loss", "lr", "grad_norm", "tokens_per_second", "mfu", "memory", "seconds")
LOADS = ("fullest", "entropy", "balance_loss", "z_loss", "dropped")
SHOWN = 6  # runs in one picture
BUCKETS = 600  # of a long run's steps: each keeps its first, and its extremes
CELLS = 40_000  # numbers of tokens by layer and expert, of all steps that have them
LISTED = 1 << 20  # bytes of jobs that the list of runs reads
QUIET = 10.0  # seconds, or five steps: longer without a record, a run that nobody holds has ended
LOCKS = Path("/proc/locks")


def payload(ask: Ask) -> dict[str, Any]:
    """The list of runs, and all that is drawn of those that are asked for; without a name, of the newest."""
    ask.only("runs")
    if not ask.runs:
        return {"runs": [], "shown": [], "notes": [], "asks": {}, "given": 0, "columns": COLUMNS, "now": time.time()}
    runs, notes = runs_in(ask.runs)
    names = [name for name in ask.text("runs").split(",") if name] or list(runs)[:1]
    if len(names) > SHOWN:
        raise UserError(f"{len(names)} runs are asked for, and a picture has at most {SHOWN}")
    names = list(dict.fromkeys(names))
    shown = [_full_run(run_of(runs, name), len(names)) for name in names]
    traced = next((run["name"] for run in shown if run["traced"]), None)
    return {
        "runs": _list(list(runs.values())),
        "shown": shown,
        "notes": notes,
        "asks": {"trace": {"run": traced}} if traced else {},
        "given": len(ask.runs),
        "columns": COLUMNS,
        "now": time.time(),
    }


def tail(ask: Ask) -> dict[str, Any]:
    """What a run's metrics have from an offset on; its events, if there may be new ones since `life`."""
    ask.only("run", "file", "offset", "life")
    run = run_of(runs_in(ask.runs)[0], ask.text("run"))
    piece = metrics(run, ask.integer("file") or 0, ask.integer("offset") or 0)
    life = signature(run)
    news = {} if life == ask.text("life") else {"events": events(run)}
    return _drawn([piece], piece.records) | _state(run, piece.records) | news | {"life": life, "anew": piece.anew}


def trace(ask: Ask) -> dict[str, Any]:
    """The lanes of a run's trace in one of its steps."""
    ask.only("run", "step")
    run = run_of(runs_in(ask.runs)[0], ask.text("run"))
    path = run.inside("trace.json")
    if path is None:
        raise UserError(f"trace.json of {run.name} leads out of the directory that was given")
    return {"run": run.name} | lanes(path, ask.integer("step"))


def _full_run(run: RunFiles, runs: int) -> dict[str, Any]:
    """One of so many `runs` of an answer."""
    pieces, rest = all_metrics(run, runs)
    left = [rest] if rest else []
    records = [record for piece in pieces for record in piece.records]
    job = run.table(JOB, left)
    return {
        "name": run.name,
        "directory": as_text(run.path),
        "job": job,
        "environment": run.table(ENVIRONMENT, left),
        "layout": _layout(job),
        "events": events(run, left),
        "left_out": left,
        "life": signature(run),
        "traced": (path := run.inside("trace.json")) is not None and os.path.isfile(path),
    } | _drawn(pieces, records) | _state(run, records)  # fmt: skip


def _drawn(pieces: Sequence[MetricsPiece], records: Sequence[Record]) -> dict[str, Any]:
    """Curves as columns, evaluations, the load of experts, and where the next question goes on."""
    steps = [record for record in records if isinstance(record, Step)]
    kept = thinned(steps)
    columns: dict[str, list[Any]] = {name: [getattr(step, name) for step in kept] for name in COLUMNS}
    if any(step.load for step in kept):
        columns |= {name: [getattr(step.load, name, None) for step in kept] for name in LOADS}
    looks = [[record.step, record.held_out_loss] for record in records if isinstance(record, Evaluation)]
    return {
        "columns": columns,
        "records": len(steps),
        "evaluations": looks,
        "loads": _loads(steps),
        "damaged": sum(piece.damaged for piece in pieces),
        "tokens": sum(step.tokens for step in steps),
        "file": pieces[-1].file,
        "offset": pieces[-1].offset,
        "size": pieces[-1].size,
    }


def thinned(steps: Sequence[Step]) -> Sequence[Step]:
    """All of a short run; of a long one each bucket's first step, and those with its extremes of loss and norm."""
    if len(steps) <= 4 * BUCKETS:
        return steps
    kept = {0, len(steps) - 1}
    for number in range(BUCKETS):
        at = range(number * len(steps) // BUCKETS, (number + 1) * len(steps) // BUCKETS)
        known = sorted((loss, n) for n in at if (loss := steps[n].loss) is not None)
        gap = next((n for n in at if steps[n].loss is None), at[0])
        kept |= {at[0], gap} | ({known[0][1], known[-1][1]} if known else set())
        kept.add(max(at, key=lambda n: steps[n].grad_norm))
    return [steps[at] for at in sorted(kept)]


def _loads(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Tokens by layer and expert, of as many steps that have them as there is room for, the last one among them."""
    full = [(step.step, step.load.tokens) for step in steps if step.load is not None and step.load.tokens]
    if not full:
        return []
    most = max(1, CELLS // max(1, sum(map(len, full[-1][1]))))
    stride = -(-len(full) // most)
    return [{"step": step, "tokens": tokens} for step, tokens in full[::-1][::stride][::-1]]


def _state(run: RunFiles, records: Sequence[Record]) -> dict[str, Any]:
    """Whether it trains now: its directory is claimed by a process of this machine, or a record came lately."""
    try:
        written = os.lstat(run.path / METRICS).st_mtime
    except OSError:
        written = None
    last = next((record for record in reversed(records) if isinstance(record, Step)), None)
    patience = max(QUIET, 5 * last.seconds) if last else QUIET
    lately = written is not None and time.time() - written < patience
    return {"training": claimed(run.path / "claim") or lately, "written": written, "now": time.time()}


def claimed(path: Path, locks: Path = LOCKS) -> bool:
    """Whether a process of this machine holds the claim. The kernel's list is read: to try the lock would disturb."""
    try:
        known, text = os.lstat(path), locks.read_text()
    except OSError:
        return False
    place = f"{os.major(known.st_dev):02x}:{os.minor(known.st_dev):02x}:{known.st_ino}"
    return any(place in line.split() and "FLOCK" in line and "->" not in line for line in text.splitlines())


def _list(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """A line for each, the newest first. Jobs are read as long as all of them together are no longer than LISTED."""
    left, lines = LISTED, []
    for run in runs:
        left -= _size(run.path / JOB)
        lines.append(_listed(run, run.table(JOB) if left >= 0 else {}))
    return lines


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _listed(run: RunFiles, job: dict[str, Any]) -> dict[str, Any]:
    """What is known without reading its metrics."""
    try:
        written: float | None = os.lstat(run.path / METRICS).st_mtime
    except OSError:
        written = None
    model, train = _section(job, "model"), _section(job, "train")
    steps = train.get("steps") if isinstance(train.get("steps"), int) else None
    about = {"model": str(model.get("name", "")), "layout": _layout(job), "steps": steps}
    return {"name": run.name, "directory": as_text(run.path), "written": written, **about}


def _layout(job: dict[str, Any]) -> str:
    """As its job has it, without what is usual. A schedule's file is named, and not opened."""
    table, usual = _section(job, "layout"), Layout()
    if not table:
        return ""
    words = []
    for name in Layout.__struct_fields__:
        value = table.get(name)
        if name in table and value != getattr(usual, name) and value not in ([], None):
            words.append(name if value is True else f"{name}={Path(value).name if isinstance(value, str) else value}")
    return ",".join(words) or "dp=1"


def _section(job: dict[str, Any], name: str) -> dict[str, Any]:
    section = job.get(name)
    return section if isinstance(section, dict) else {}
