"""A trace told: the file for the viewer, tables for people, numbers for scripts."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fivefold.support.formatting import bytes_text, counted
from fivefold.trace.chrome import write
from fivefold.trace.records import RankTrace, Trace
from fivefold.trace.summary import Bubble, RankTime, Summary

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
            console.print(f"trace of all ranks: {self.path}; ui.perfetto.dev opens it", markup=False)


def show(console: Console, summary: Summary) -> None:
    trace, total = summary.trace, summary.total
    steps = counted(trace.steps, "step")
    console.print(f"[bold]trace[/]  {trace.layout or 'one rank'}\nms of a step, mean of {steps}")
    console.print(_times(summary))
    if summary.axes:
        console.print("\ncommunication, ms a step: exposed / hidden")
        console.print(_traffic(summary))
    if trace.schedule.p > 1:
        both = summary.bubble
        console.print(
            f"\nThe bubble is {both.measured:.1%} of the time of {trace.schedule.name}; the same schedule with the\n"
            f"medians of these durations predicts {both.predicted:.1%}."
        )
    if summary.untraced is not None:
        console.print(f"A step took {1e3 * total.step:.1f} ms with tracing and {1e3 * summary.untraced:.1f} without.")
    error = max(rank.clock_error for rank in trace.ranks)
    if error:
        console.print(f"The machines' clocks agree to {1e6 * error:.0f} us.")


def _times(summary: Summary) -> Table:
    """A row for each rank, their mean, and its shares."""
    piped, total = summary.trace.schedule.p > 1, summary.total
    table = _table("rank", *_PARTS, *(("measured", "predicted") if piped else ()))

    def cells(time: RankTime, bubble: Bubble) -> list[str]:
        shares = [f"{bubble.measured:.1%}", f"{bubble.predicted:.1%}"] if piped else []
        return [*(_ms(_part(time, name)) for name in _PARTS), *shares]

    for rank, time in _listed(summary):
        table.add_row(_name(rank), *cells(time, summary.bubble_of(rank)))
    _close(table, summary)
    table.add_row("[bold]mean[/]", *cells(total, summary.bubble))
    table.add_row("[dim]share[/]", *(f"[dim]{_part(total, name) / total.step:.1%}[/]" for name in _PARTS))
    return table


def _traffic(summary: Summary) -> Table:
    """A row for each rank, a column for each axis; and what is sent along it, by a rank in the mean."""
    axes, piped = summary.axes, summary.trace.schedule.p > 1
    table = _table("rank", *axes, *(("wait",) if piped else ()))

    def cells(time: RankTime) -> list[str]:
        both = [f"{_ms(time.exposed.get(axis, 0.0))} / {_ms(time.hidden.get(axis, 0.0))}" for axis in axes]
        return [*both, *([_ms(time.wait)] if piped else [])]

    for rank, time in _listed(summary):
        table.add_row(_name(rank), *cells(time))
    _close(table, summary)
    table.add_row("[bold]mean[/]", *cells(summary.total))
    traffic = [sent(summary.trace, axis) for axis in axes]
    table.add_row("[dim]calls[/]", *(f"[dim]{calls:g}[/]" for calls, _ in traffic))
    table.add_row("[dim]payload[/]", *(f"[dim]{bytes_text(payload)}[/]" for _, payload in traffic))
    return table


def _table(first: str, *names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _listed(summary: Summary) -> list[tuple[RankTrace, RankTime]]:
    return list(zip(summary.trace.ranks, summary.by_rank, strict=True))[:_SHOWN]


def _close(table: Table, summary: Summary) -> None:
    if (more := len(summary.trace.ranks) - _SHOWN) > 0:
        table.add_row(f"[dim]{more} more; --json has them[/]")


def _name(rank: RankTrace) -> str:
    return f"{rank.rank}  [dim]{rank.name}[/]" if rank.name else str(rank.rank)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _part(time: RankTime, name: str) -> float:
    return sum(time.exposed.values()) if name == "exposed" else getattr(time, name)


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
