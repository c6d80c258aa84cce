"""What is said about simulations: a line, a row, a table, JSON."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from fivefold.errors import UserError
from fivefold.schedule.actions import SENDS
from fivefold.schedule.benchmark import Timing
from fivefold.schedule.catalogue import CATALOGUE
from fivefold.schedule.published import PUBLISHED, reproduce
from fivefold.schedule.simulate import Simulation

LEFT_ALIGNED = ("schedule", "model", "bubble by formula")


def summary(simulation: Simulation) -> str:
    return (
        f"makespan {simulation.makespan:.6g}, bubble {simulation.bubble_makespan:.2%} of the makespan and "
        f"{simulation.bubble_span:.2%} of the span, peak {max(simulation.peak_activations):.4g} A"
    )


def figures(simulation: Simulation) -> dict[str, Any]:
    """The numbers of one schedule. Bubbles are fractions of what they are measured over; peaks are per rank, in A."""
    schedule = simulation.schedule
    return {
        "schedule": schedule.name,
        "pp": schedule.p,
        "microbatches": schedule.m,
        "chunks": schedule.placement.chunks,
        "makespan": simulation.makespan,
        "bubble_makespan": simulation.bubble_makespan,
        "bubble_span": simulation.bubble_span,
        "peak_activations": simulation.peak_activations,
        "messages": schedule.count(*SENDS),
        "buffers": schedule.buffers,
    }


def details(simulation: Simulation) -> dict[str, Any]:
    """Where the time of each rank goes, and the whole timeline as [action, start, end]."""
    ranks = [{"busy": rank.busy, "wait": rank.wait, "idle": rank.idle} for rank in simulation.ranks]
    timeline = [[[str(action), start, end] for action, start, end in spans] for spans in simulation.timeline]
    return {"ranks": ranks, "timeline": timeline}


def comparison_rows(results: Mapping[str, Simulation | UserError]) -> list[dict[str, Any]]:
    return [
        (figures(result) if isinstance(result, Simulation) else {"schedule": name, "refused": str(result)})
        | {"needs": CATALOGUE[name].needs}
        for name, result in results.items()
    ]


def comparison_table(results: Mapping[str, Simulation | UserError]) -> tuple[Table, list[str]]:
    """The schedules that work, and notes about what they need and why others are refused."""
    table = _table("schedule", "makespan", "bubble", "of span", "peak A", "messages", "bubble by formula")
    notes = []
    for name, result in results.items():
        needs = CATALOGUE[name].needs
        if isinstance(result, UserError):
            notes.append(f"{name} is refused: {result}")
            continue
        table.add_row(name, *_cells(result), CATALOGUE[name].bubble)
        notes += [f"{name} needs {needs}"] if needs else []
    return table, notes


def _cells(simulation: Simulation) -> Iterable[str]:
    yield f"{simulation.makespan:.6g}"
    yield f"{simulation.bubble_makespan:.2%}"
    yield f"{simulation.bubble_span:.2%}"
    yield f"{max(simulation.peak_activations):.4g}"
    yield f"{simulation.schedule.count(*SENDS) / simulation.schedule.m:g}"


def published_rows() -> list[dict[str, Any]]:
    """The published bubble rates, and ours."""
    return [{"model": row.model, "published": row.rates, "ours": reproduce(row)} for row in PUBLISHED]


def published_table() -> Table:
    table = _table("model", "p", "m", "schedule", "published", "ours")
    for row in PUBLISHED:
        ours = reproduce(row)
        for name, rate in row.rates.items():
            table.add_row(row.model, str(row.p), str(row.m), name, f"{rate:.4f}", f"{ours[name]:.4f}")
    return table


def benchmark_rows(timings: Iterable[Timing]) -> list[dict[str, Any]]:
    keys = ("compute_actions", "actions", "build", "check", "simulate", "total")
    return [timing.case._asdict() | {key: getattr(timing, key) for key in keys} for timing in timings]


def benchmark_table(timings: Iterable[Timing]) -> Table:
    table = _table("schedule", "p", "m", "v", "compute", "actions", "build", "check", "run", "total", "us")
    for timing in timings:
        name, p, m, v = timing.case
        counts = (p, m, v or 1, timing.compute_actions, timing.actions)
        seconds = (timing.build, timing.check, timing.simulate, timing.total)
        per_action = f"{1e6 * timing.total / timing.actions:.1f}"
        table.add_row(name, *map(str, counts), *(f"{value:.3f}" for value in seconds), per_action)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in LEFT_ALIGNED else "right", no_wrap=True)
    return table
