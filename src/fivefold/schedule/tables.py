"""What is said about simulations: a line, a row, a table, JSON."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from fivefold.schedule.actions import SENDS
from fivefold.schedule.catalogue import CATALOGUE
from fivefold.schedule.published import PUBLISHED, reproduce
from fivefold.schedule.simulate import Simulation
from fivefold.schedule.wording import figure
from fivefold.support.errors import UserError
from fivefold.support.formatting import bytes_text

LEFT_ALIGNED = ("schedule", "model", "bubble by formula")


def summary(simulation: Simulation) -> str:
    return (
        f"makespan {figure(simulation.makespan)}, bubble {simulation.bubble_makespan:.2%} of the makespan and "
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
        "bytes_sent": schedule.count(*SENDS) * simulation.costs.link.message,
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
    table = _table("schedule", "v", "makespan", "bubble", "of span", "peak A", "sends", "bubble by formula")
    notes = []
    refused: dict[str, list[str]] = {}  # why -> who; the same reason is given once
    for name, result in results.items():
        needs = CATALOGUE[name].needs
        if isinstance(result, UserError):
            refused.setdefault(str(result), []).append(name)
            continue
        table.add_row(name, *_cells(result), CATALOGUE[name].bubble)
        notes += [f"{name} needs {needs}"] if needs else []
    for reason, names in refused.items():
        notes.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} refused: {reason}")
    return table, notes


def _cells(simulation: Simulation) -> Iterable[str]:
    schedule, size = simulation.schedule, simulation.costs.link.message
    per_rank = schedule.count(*SENDS) / schedule.p
    yield str(schedule.placement.chunks)
    yield figure(simulation.makespan)
    yield f"{simulation.bubble_makespan:.2%}"
    yield f"{simulation.bubble_span:.2%}"
    yield f"{max(simulation.peak_activations):.4g}"
    yield bytes_text(per_rank * size) if size else f"{per_rank / schedule.m:.3g}"


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


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in LEFT_ALIGNED else "right", no_wrap=True)
    return table
