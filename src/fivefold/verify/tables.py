"""Verdicts for people and for scripts."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.layout.axes import AXES, shown_order
from fivefold.support.formatting import bytes_text, graphs_text
from fivefold.verify import compare
from fivefold.verify.compare import Error, bound_of
from fivefold.verify.layouts import Case
from fivefold.verify.verdict import Count, Verdict


def _mark(holds: bool) -> Text:
    return Text("ok", "green") if holds else Text("FAILS", "bold red")


def numbers(verdict: Verdict) -> RenderableType:
    """One layout: every step's loss and norm, the worst tensors, the traffic of a step."""
    job = verdict.job
    size = f"{job.model.name} ({job.model.layers} layers of {job.model.hidden}) in {job.train.dtype}"
    title = f"{job.layout} against one process: {size}, {job.train.steps} steps of {job.train.batch} x {job.data.seq}"
    if verdict.broken:
        return Group(Text(title, "bold"), Text(verdict.details, "dim"))
    parts: list[RenderableType] = [Text(title, "bold"), _compared(verdict)]
    if verdict.traffic:
        parts += ["", _traffic(verdict)]
    if verdict.held:
        parts += ["", _held(verdict)]
    if verdict.graphs is not None:
        parts += ["", graphs_text(*verdict.graphs, blocks=job.layout.compiles_blocks)]
    return Group(*parts)


def _compared(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "layout", "one process", "error", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for what, pairs in (("loss", verdict.losses), ("norm", verdict.norms)):
        errors = [error for error in verdict.errors if error.what == what]
        for error, (found, wanted) in zip(errors, pairs, strict=True):
            numbers = (f"{found:.10g}", f"{wanted:.10g}", _size(error))
            table.add_row(f"{what}, step {error.step}", *numbers, _mark(error.holds))
    for what in ("gradient", "parameter"):
        if (worst := verdict.worst(what)) is not None:
            table.add_row(f"worst {what}", worst.name, f"step {worst.step}", _size(worst), _mark(worst.holds))
    table.add_row("allowed", "", "", f"{bound_of(verdict.job):.1e}", "")
    return table


def _size(error: Error) -> str:
    return error.note or f"{error.value:.1e}"


def _traffic(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    steps = verdict.job.train.steps
    for name in ("sent, per step", "calls", "payload", "wire", "expected", ""):
        table.add_column(name, justify="left" if name in ("sent, per step", "") else "right", no_wrap=True)
    for count in in_order(verdict.traffic):
        seen, wanted = count.counted, count.expected
        closed = "the same" if count.holds else f"{_per(wanted.calls, steps)} calls, {_per(wanted.payload, steps)} B"
        sizes = (bytes_text(seen.payload / steps), bytes_text(float(seen.wire) / steps))
        name = f"{seen.axis}  {seen.kind}"
        table.add_row(name, _per(seen.calls, steps), *sizes, closed, _mark(count.holds))
    return table


def _held(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("held by rank 0", "counted", "expected", ""):
        table.add_column(name, justify="right" if name in ("counted", "expected") else "left", no_wrap=True)
    for one in verdict.held:
        said = (lambda n: f"{n:g}") if one.name == "microbatches in flight" else bytes_text
        name = one.name if one.holds else f"{one.name}, rank {one.rank}"
        table.add_row(name, said(one.counted), "the same" if one.holds else said(one.expected), _mark(one.holds))
    return table


def _per(total: int, steps: int) -> str:
    return f"{total / steps:g}" if total < 1e6 * steps else f"{total / steps:.0f}"


def in_order(counts: Sequence[Count]) -> list[Count]:
    return sorted(counts, key=lambda count: (shown_order(count.counted.axis), count.counted.kind))


# ---- many layouts --------------------------------------------------------------------------------------------------


def summary(judged: Sequence[tuple[Case, Verdict]]) -> Table:
    """A row for each model and each dp x cp x tp x pp: how many of its layouts hold, and the worst of them."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for case, verdict in judged:
        layout = verdict.job.layout
        degrees = " ".join(f"{axis}={n}" for axis in AXES if (n := layout.degrees.get(axis, 1)) > 1)
        groups.setdefault((case.variant or case.job.model.name, degrees or "dp=1"), []).append(verdict)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("model", "ranks", "hold", "worst\ngradient", "worst\nparameter", "traffic", "memory"):
        left = name in ("model", "ranks", "traffic", "memory")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for (model, degrees), verdicts in groups.items():
        held = sum(verdict.passed for verdict in verdicts)
        errors = [
            compare.worst(e for v in verdicts for e in v.errors if e.what == what) for what in ("gradient", "parameter")
        ]
        table.add_row(
            model,
            degrees,
            Text(f"{held}/{len(verdicts)}", "green" if held == len(verdicts) else "bold red"),
            *(_size(error) if error else "-" for error in errors),
            _mark(all(count.holds for verdict in verdicts for count in verdict.traffic)),
            _mark(all(one.holds for verdict in verdicts for one in verdict.held)),
        )
    return table


# ---- for scripts ---------------------------------------------------------------------------------------------------


def row(verdict: Verdict, variant: str = "") -> dict[str, Any]:
    job = verdict.job
    return {
        "layout": str(job.layout),
        "model": job.model.name,
        "variant": variant,
        "dtype": job.train.dtype,
        "passed": verdict.passed,
        "problems": verdict.problems,
        "details": verdict.details,
        "bound": bound_of(job),
        "losses": [{"layout": _finite(found), "reference": _finite(wanted)} for found, wanted in verdict.losses],
        "norms": [{"layout": _finite(found), "reference": _finite(wanted)} for found, wanted in verdict.norms],
        "worst_loss": _error(verdict.worst("loss")),
        "worst_norm": _error(verdict.worst("norm")),
        "worst_gradient": _error(verdict.worst("gradient")),
        "worst_parameter": _error(verdict.worst("parameter")),
        "traffic_per_step": [_count(count, job.train.steps) for count in in_order(verdict.traffic)],
        "held": [
            {"name": one.name, "rank": one.rank, "counted": one.counted, "expected": one.expected, "holds": one.holds}
            for one in verdict.held
        ],
        "peak_bytes": verdict.peak,
        "flops": verdict.flops,
        "graphs": None if verdict.graphs is None else verdict.graphs[0],
        "graph_breaks": None if verdict.graphs is None else verdict.graphs[1],
        "seconds": round(verdict.seconds, 3),
    }


def _error(error: Error | None) -> dict[str, Any] | None:
    if error is None:
        return None
    value = _finite(error.value)
    return {"name": error.name, "step": error.step, "error": value, "note": error.note, "holds": error.holds}


def _count(count: Count, steps: int) -> dict[str, Any]:
    def numbers(row: Any) -> dict[str, float]:
        values = {"calls": row.calls / steps, "payload": row.payload / steps, "wire": float(row.wire) / steps}
        return {name: int(value) if value == int(value) else value for name, value in values.items()}

    counted, wanted = count.counted, count.expected
    return {
        "axis": counted.axis,
        "kind": counted.kind,
        "counted": numbers(counted),
        "expected": numbers(wanted),
        "holds": count.holds,
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return number if math.isfinite(number) else None
