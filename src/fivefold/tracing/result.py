"""The result of a trace: tables, JSON, and the file for a trace viewer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fivefold.render.blocks import Block, Cell, Result, Row, Table, Text, render, width_of
from fivefold.support.text import bytes_text, plural
from fivefold.tracing.chrome import write_trace
from fivefold.tracing.records import Trace
from fivefold.tracing.summary import Bubble, TracedTime, TraceSummary

_PARTS_OF_STEP = ("step", "compute", "exposed", "bubble", "optimizer", "other")
_MAX_ROWS = 16  # ranks that have a row of their own


@dataclass(frozen=True)
class TraceResult(Result):
    summary: TraceSummary
    file: Path  # for a trace viewer

    def blocks(self) -> Iterator[Block]:
        summary, trace, total = self.summary, self.summary.trace, self.summary.total
        yield Text(f"trace  {trace.layout or 'one rank'}", "bold")
        yield Text(f"ms of a step, mean of {plural(trace.step_count, 'step')}")
        yield self._times()
        if summary.axes:
            yield Text("\ncommunication, ms a step: exposed / hidden")
            yield self._traffic()
        if parts := ", ".join(f"{name} {_ms(seconds)}" for name, seconds in summary.action_parts.items()):
            yield Text(f"\nexperts, ms a step with waits: {parts}")
        if trace.schedule.p > 1:
            bubble = summary.bubble
            yield Text(
                f"\nThe bubble is {bubble.measured:.1%} of the time of {trace.schedule.name}; the same schedule with "
                f"the medians of these durations predicts {bubble.predicted:.1%}."
            )
        if summary.untraced is not None:
            yield Text(f"A step took {1e3 * total.step:.1f} ms with tracing and {1e3 * summary.untraced:.1f} without.")
        if error := max(rank.clock_error for rank in trace.ranks):
            yield Text(f"The machines' clocks agree to {1e6 * error:.0f} us.")
        yield Text(f"trace of all ranks: {self.file}; ui.perfetto.dev opens it")

    def _times(self) -> Table:
        """A column for each part of a step, and what the bubble was and was predicted to be."""
        has_pipeline, total = self.summary.trace.schedule.p > 1, self.summary.total
        shares = [f"{_seconds_of(total, name) / total.step:.1%}" for name in _PARTS_OF_STEP]

        def cells(time: TracedTime, bubble: Bubble) -> list[str]:
            bubbles = [f"{bubble.measured:.1%}", f"{bubble.predicted:.1%}"] if has_pipeline else []
            return [*(_ms(_seconds_of(time, name)) for name in _PARTS_OF_STEP), *bubbles]

        heads = (*_PARTS_OF_STEP, "measured", "predicted") if has_pipeline else _PARTS_OF_STEP
        return self._by_rank(heads, cells, ["share", *shares])

    def _traffic(self) -> Table:
        """A column for each axis; the last rows have the mean calls and payload of a rank."""
        axes, has_pipeline = self.summary.axes, self.summary.trace.schedule.p > 1
        calls, payload = zip(*(mean_traffic(self.summary.trace, axis) for axis in axes), strict=True)

        def cells(time: TracedTime, bubble: Bubble) -> list[str]:
            texts = [f"{_ms(time.exposed.get(axis, 0.0))} / {_ms(time.hidden.get(axis, 0.0))}" for axis in axes]
            return [*texts, *([_ms(time.wait)] if has_pipeline else [])]

        footer = ["calls", *(f"{count:g}" for count in calls)], ["payload", *map(bytes_text, payload)]
        return self._by_rank((*axes, "wait") if has_pipeline else axes, cells, *footer)

    def _by_rank(self, heads: Sequence[str], cells: Callable[[TracedTime, Bubble], list[str]], *footer: Row) -> Table:
        """A row for each rank, at most `_MAX_ROWS`, then their mean, then the rows of the footer."""
        summary, ranks = self.summary, self.summary.trace.ranks
        rows: list[Row] = [
            [f"{rank.rank}  {rank.name}".rstrip(), *cells(time, summary.bubble_of(rank))]
            for rank, time in list(zip(ranks, summary.by_rank, strict=True))[:_MAX_ROWS]
        ]
        if (more := len(ranks) - _MAX_ROWS) > 0:
            rows.append([Cell(f"{more} more; --json has them", "dim")])
        mean = [Cell("mean", "bold"), *cells(summary.total, summary.bubble)]
        dim = ([Cell(cell, "dim") for cell in row] for row in footer)
        return Table(["rank", *(f">{name}" for name in heads)], rows, totals=[mean, *dim])

    def to_dict(self) -> dict[str, Any]:
        return self.figures() | {"file": str(self.file)}

    def figures(self) -> dict[str, Any]:
        """The figures of the summary, which are also written into the trace file."""
        summary, trace = self.summary, self.summary.trace
        ranks = [
            {"rank": rank.rank, "place": rank.name} | _figures_of(time, summary.bubble_of(rank))
            for rank, time in zip(trace.ranks, summary.by_rank, strict=True)
        ]
        axes = {axis: dict(zip(("calls", "payload"), mean_traffic(trace, axis), strict=True)) for axis in summary.axes}
        return {
            "layout": trace.layout,
            "schedule": trace.schedule.name,
            "steps": trace.step_count,
            "untraced_step": summary.untraced,
            "clock_error": max(rank.clock_error for rank in trace.ranks),
            "ranks": ranks,
            "mean": _figures_of(summary.total, summary.bubble),
            "sent": axes,
            "experts": summary.action_parts,
        }


class TraceFile:
    """Writes a run's trace when called with it; `show` prints the summary, if there was a trace."""

    def __init__(self, path: Path):
        self.path = path
        self.result: TraceResult | None = None

    def __call__(self, trace: Trace) -> None:
        self.result = TraceResult(TraceSummary(trace), self.path)
        write_trace(self.result.summary, self.path.expanduser(), self.result.figures())

    def show(self, console: Console) -> None:
        if self.result is not None:
            render(self.result.blocks(), console, width_of(console))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _seconds_of(time: TracedTime, name: str) -> float:
    """The time of a part of a step; that of exposed communication is a sum over axes."""
    return sum(time.exposed.values()) if name == "exposed" else getattr(time, name)


def mean_traffic(trace: Trace, axis: str) -> tuple[float, float]:
    """(calls, payload bytes) along an axis: the mean of a rank and a step."""
    flights = [flight for rank in trace.ranks for flight in rank.flights if flight.axis == axis]
    rank_steps = len(trace.ranks) * trace.step_count
    return len(flights) / rank_steps, sum(flight.payload for flight in flights) / rank_steps


def _figures_of(time: TracedTime, bubble: Bubble) -> dict[str, Any]:
    """The figures of a rank, or of the mean of all."""
    return asdict(time) | {"bubble_measured": bubble.measured, "bubble_predicted": bubble.predicted}
