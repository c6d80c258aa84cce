"""A trace told: the file for the viewer, tables for people, numbers for scripts."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fivefold.trace.chrome import write
from fivefold.trace.records import Trace
from fivefold.trace.summary import Bubble, RankTime, Summary
from fivefold.words import bytes_text

_PARTS = ("step", "compute", "exposed", "bubble", "optimizer", "other")
_SHOWN = 16  # ranks that are listed one by one


class TraceFile:
    """Takes a run's trace and writes it; `show` says what it says, and nothing where there was none."""

    def __init__(self, path: Path):
        self.path = path
        self.summary: Summary | None = None

    def __call__(self, trace: Trace) -> None:
        self.summary = Summary(trace)
        write(self.summary, self.path)

    def show(self, console: Console) -> None:
        if self.summary is not None:
            show(console, self.summary)
            console.print(f"trace of all ranks in {self.path}; open it in ui.perfetto.dev", markup=False)


def show(console: Console, summary: Summary) -> None:
    trace, total = summary.trace, summary.total
    steps = f"{trace.steps} step{'s' if trace.steps > 1 else ''}"
    layout = f"{trace.layout}, " if trace.layout else ""
    console.print(f"[bold]trace[/]  {layout}schedule {trace.schedule.name}: ms of a step, mean of {steps}")
    console.print(_times(summary))
    if summary.axes:
        console.print()
        console.print(_traffic(summary))
    both = summary.bubble
    console.print(
        f"\nbubble {both.measured:.1%} of the pipeline's time, {both.predicted:.1%} predicted: the same schedule with "
        "the medians of these durations",
        soft_wrap=True,
    )
    if summary.untraced is not None:
        console.print(
            f"a step took {1e3 * total.step:.1f} ms with tracing, {1e3 * summary.untraced:.1f} ms without",
            soft_wrap=True,
        )
    error = max(rank.clock_error for rank in trace.ranks)
    if error:
        console.print(f"the machines' clocks agree to {1e6 * error:.0f} us")


def _times(summary: Summary) -> Table:
    """A row for each rank, and their mean."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rank", no_wrap=True)
    for name in (*_PARTS, "bubble", "predicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, time in list(zip(summary.trace.ranks, summary.by_rank, strict=True))[:_SHOWN]:
        table.add_row(f"{rank.rank}  [dim]{rank.name}[/]", *_cells(time, summary.bubble_of(rank)))
    if (more := len(summary.trace.ranks) - _SHOWN) > 0:
        table.add_row(f"[dim]{more} more[/]")
    table.add_row("[bold]mean[/]", *_cells(summary.total, summary.bubble))
    total = summary.total
    shares = [f"[dim]{_part(total, name) / total.step:.1%}[/]" if total.step else "" for name in _PARTS]
    table.add_row("[dim]share[/]", *shares)
    return table


def _part(time: RankTime, name: str) -> float:
    return sum(time.exposed.values()) if name == "exposed" else getattr(time, name)


def _cells(time: RankTime, bubble: Bubble) -> list[str]:
    numbers = [f"{1e3 * _part(time, name):.1f}" for name in _PARTS]
    return [*numbers, f"{bubble.measured:.1%}", f"{bubble.predicted:.1%}"]


def _traffic(summary: Summary) -> Table:
    """A row for each axis: what a rank sends along it in a step, and what that cost."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("axis", no_wrap=True)
    for name in ("calls", "payload", "exposed", "least", "most", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for axis in summary.axes:
        calls, payload = sent(summary.trace, axis)
        over_ranks = [time.exposed.get(axis, 0.0) for time in summary.by_rank]
        numbers = (summary.total.exposed.get(axis, 0.0), min(over_ranks), max(over_ranks))
        hidden = summary.total.hidden.get(axis, 0.0)
        table.add_row(axis, f"{calls:g}", bytes_text(payload), *(f"{1e3 * one:.1f}" for one in (*numbers, hidden)))
    return table


def sent(trace: Trace, axis: str) -> tuple[float, float]:
    """Calls and payload bytes along an axis, for a rank and a step in the mean."""
    flights = [flight for rank in trace.ranks for flight in rank.flights if flight.axis == axis]
    parts = len(trace.ranks) * trace.steps
    return len(flights) / parts, sum(flight.payload for flight in flights) / parts


# ---- for scripts ---------------------------------------------------------------------------------------------------


def rows(summary: Summary) -> dict[str, Any]:
    trace = summary.trace
    ranks = [
        {"rank": rank.rank, "place": rank.name} | _row(time, summary.bubble_of(rank))
        for rank, time in zip(trace.ranks, summary.by_rank, strict=True)
    ]
    axes = {axis: dict(zip(("calls", "payload"), sent(trace, axis), strict=True)) for axis in summary.axes}
    return {
        "layout": trace.layout,
        "schedule": trace.schedule.name,
        "steps": trace.steps,
        "untraced_step": summary.untraced,
        "clock_error": max(rank.clock_error for rank in trace.ranks),
        "ranks": ranks,
        "mean": _row(summary.total, summary.bubble),
        "sent": axes,
    }


def _row(time: RankTime, bubble: Bubble) -> dict[str, Any]:
    names = ("step", "compute", "bubble", "optimizer", "other", "wait", "exposed", "hidden")
    shares = {"bubble_measured": bubble.measured, "bubble_predicted": bubble.predicted}
    return {name: getattr(time, name) for name in names} | shares
