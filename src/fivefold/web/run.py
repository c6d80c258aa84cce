"""The Run view: training runs of the directories that `fivefold ui --runs` names, while they train and afterwards.

payload(Ask({}, runs=(Path("runs"),)))                          # all runs, and the newest in full
payload(Ask({"runs": "demo,demo-2"}, runs=...))                 # these
tail(Ask({"run": "demo", "file": "81", "offset": "9000"}, runs=...))     # the records since then
trace(Ask({"run": "demo", "step": "6"}, runs=...))              # the lanes of its trace, measured and simulated

Records are those of metrics.jsonl as the trainer wrote them. A long run's curves are thinned, and the page says so.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fivefold.layout.layout import Layout
from fivefold.support.errors import UserError
from fivefold.tracing.lanes import read_lanes
from fivefold.trainer.records import METRICS_FILE, Evaluation, Record, Step
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
LOAD_COLUMNS = ("fullest", "entropy", "balance_loss", "z_loss", "dropped")
MAX_SHOWN_RUNS = 6  # in one picture
CURVE_BUCKETS = 600  # into which a long run's steps are split: each keeps its first step and its extremes
MAX_LOAD_CELLS = 40_000  # tokens by layer and expert that are sent, over all steps
MAX_LISTED_JOB_BYTES = 1 << 20  # that the list of runs reads
MIN_QUIET_S = 10.0  # without a record for so long, and five steps, a run that no process has claimed has ended
KERNEL_LOCKS = Path("/proc/locks")


def payload(ask: Ask) -> dict[str, Any]:
    """The list of runs, and the records of those that are asked for, by default of the newest."""
    ask.only("runs")
    if not ask.runs:
        return {"runs": [], "shown": [], "notes": [], "asks": {}, "given": 0, "columns": COLUMNS, "now": time.time()}
    runs, notes = runs_in(ask.runs)
    names = [name for name in ask.text("runs").split(",") if name] or list(runs)[:1]
    if len(names) > MAX_SHOWN_RUNS:
        raise UserError(f"{len(names)} runs are asked for, but a picture has at most {MAX_SHOWN_RUNS}", "page.size")
    names = list(dict.fromkeys(names))
    shown = [_full_run(run_of(runs, name), len(names)) for name in names]
    traced = next((run["name"] for run in shown if run["traced"]), None)
    return {
        "runs": _list_runs(list(runs.values())),
        "shown": shown,
        "notes": notes,
        "asks": {"trace": {"run": traced}} if traced else {},
        "given": len(ask.runs),
        "columns": COLUMNS,
        "now": time.time(),
    }


def tail(ask: Ask) -> dict[str, Any]:
    """A run's records from an offset on; and its events, if its signature is no longer `life`."""
    ask.only("run", "file", "offset", "life")
    runs, _ = runs_in(ask.runs)
    run = run_of(runs, ask.text("run"))
    piece = metrics(run, ask.integer("file") or 0, ask.integer("offset") or 0)
    life = signature(run)
    new_events = {} if life == ask.text("life") else {"events": events(run)}
    state = _state(run, piece.records) | new_events | {"life": life, "anew": piece.anew}
    return _curves([piece], piece.records) | state


def trace(ask: Ask) -> dict[str, Any]:
    """The lanes of a run's trace for one of its steps."""
    ask.only("run", "step")
    runs, _ = runs_in(ask.runs)
    run = run_of(runs, ask.text("run"))
    path = run.inside("trace.json")
    if path is None:
        raise UserError(f"trace.json of {run.name} leads out of the directory that was given", "page.file")
    return {"run": run.name} | read_lanes(path, ask.integer("step"))


def _full_run(run: RunFiles, runs: int) -> dict[str, Any]:
    """All about one run, in an answer about `runs` of them."""
    pieces, note = all_metrics(run, runs)
    left_out = [note] if note else []  # sentences about what was not read
    records = [record for piece in pieces for record in piece.records]
    job = run.table(JOB, left_out)
    return {
        "name": run.name,
        "directory": as_text(run.path),
        "job": job,
        "environment": run.table(ENVIRONMENT, left_out),
        "layout": _layout(job),
        "events": events(run, left_out),
        "left_out": left_out,
        "life": signature(run),
        "traced": (path := run.inside("trace.json")) is not None and os.path.isfile(path),
    } | _curves(pieces, records) | _state(run, records)  # fmt: skip


def _curves(pieces: Sequence[MetricsPiece], records: Sequence[Record]) -> dict[str, Any]:
    """Curves as columns, evaluations, the load of experts, and the offset from which `tail` goes on."""
    steps = [record for record in records if isinstance(record, Step)]
    kept = thin(steps)
    columns: dict[str, list[Any]] = {name: [getattr(step, name) for step in kept] for name in COLUMNS}
    if any(step.load for step in kept):
        columns |= {name: [getattr(step.load, name, None) for step in kept] for name in LOAD_COLUMNS}
    evaluations = [[record.step, record.held_out_loss] for record in records if isinstance(record, Evaluation)]
    return {
        "columns": columns,
        "records": len(steps),
        "evaluations": evaluations,
        "loads": _loads(steps),
        "damaged": sum(piece.damaged for piece in pieces),
        "tokens": sum(step.tokens for step in steps),
        "file": pieces[-1].file,
        "offset": pieces[-1].offset,
        "size": pieces[-1].size,
    }


def thin(steps: Sequence[Step]) -> Sequence[Step]:
    """All steps of a short run. Of a long one, each bucket's first step, its first without a loss, and the steps with
    its lowest and highest loss and its highest gradient norm."""
    if len(steps) <= 4 * CURVE_BUCKETS:
        return steps
    kept = {0, len(steps) - 1}
    for number in range(CURVE_BUCKETS):
        bucket = range(number * len(steps) // CURVE_BUCKETS, (number + 1) * len(steps) // CURVE_BUCKETS)
        with_loss = [index for index in bucket if steps[index].loss is not None]
        kept |= {bucket[0], next((index for index in bucket if steps[index].loss is None), bucket[0])}
        if with_loss:
            by_loss = sorted((steps[index].loss or 0.0, index) for index in with_loss)
            (_, lowest), (_, highest) = by_loss[0], by_loss[-1]
            kept |= {lowest, highest}
        kept.add(max(bucket, key=lambda index: steps[index].grad_norm))
    return [steps[index] for index in sorted(kept)]


def _loads(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Tokens by layer and expert, at most MAX_LOAD_CELLS: for evenly spread steps that have them, and the last."""
    loads = [(step.step, step.load.tokens) for step in steps if step.load is not None and step.load.tokens]
    if not loads:
        return []
    _, last_tokens = loads[-1]
    most = max(1, MAX_LOAD_CELLS // max(1, sum(map(len, last_tokens))))
    stride = -(-len(loads) // most)
    return [{"step": step, "tokens": tokens} for step, tokens in loads[::-1][::stride][::-1]]


def _state(run: RunFiles, records: Sequence[Record]) -> dict[str, Any]:
    """Whether a run trains now: a process of this machine has claimed its directory, or a record was written lately."""
    try:
        written = os.lstat(run.path / METRICS_FILE).st_mtime
    except OSError:
        written = None
    last = next((record for record in reversed(records) if isinstance(record, Step)), None)
    patience = max(MIN_QUIET_S, 5 * last.seconds) if last else MIN_QUIET_S
    lately = written is not None and time.time() - written < patience
    return {"training": is_claimed(run.path / "claim") or lately, "written": written, "now": time.time()}


def is_claimed(path: Path, locks: Path = KERNEL_LOCKS) -> bool:
    """Whether a process of this machine holds the lock on a claim, by the kernel's list of locks: taking the lock would
    disturb the run."""
    try:
        status, text = os.lstat(path), locks.read_text()
    except OSError:
        return False
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(inode in line.split() and "FLOCK" in line and "->" not in line for line in text.splitlines())


def _list_runs(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """An entry for each run, the newest first. Jobs are read until they have MAX_LISTED_JOB_BYTES in total."""
    bytes_left, entries = MAX_LISTED_JOB_BYTES, []
    for run in runs:
        bytes_left -= _size(run.path / JOB)
        entries.append(_list_entry(run, run.table(JOB) if bytes_left >= 0 else {}))
    return entries


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _list_entry(run: RunFiles, job: dict[str, Any]) -> dict[str, Any]:
    """What the list shows of a run, without reading its metrics."""
    try:
        written: float | None = os.lstat(run.path / METRICS_FILE).st_mtime
    except OSError:
        written = None
    model, train = _section(job, "model"), _section(job, "train")
    steps = train.get("steps") if isinstance(train.get("steps"), int) else None
    of_job = {"model": str(model.get("name", "")), "layout": _layout(job), "steps": steps}
    return {"name": run.name, "directory": as_text(run.path), "written": written, **of_job}


def _layout(job: dict[str, Any]) -> str:
    """The layout of a job's table as text, without defaults. A schedule's file is named but not opened."""
    table, defaults = _section(job, "layout"), Layout()
    if not table:
        return ""
    settings = []
    for name in Layout.__struct_fields__:
        value = table.get(name)
        if name in table and value != getattr(defaults, name) and value not in ([], None):
            settings.append(
                name if value is True else f"{name}={Path(value).name if isinstance(value, str) else value}"
            )
    return ",".join(settings) or "dp=1"


def _section(job: dict[str, Any], name: str) -> dict[str, Any]:
    section = job.get(name)
    return section if isinstance(section, dict) else {}
