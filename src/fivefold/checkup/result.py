"""What `fivefold checkup` prints: its parts, the layouts beside their predictions, and what to correct."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from fivefold.checkup.parts import PARTS, Budget
from fivefold.checkup.report import CheckupReport, LayoutRun, LayoutStep, Status
from fivefold.render.blocks import Block, Cell, Result, Style, Table, Text
from fivefold.support.text import bytes_text, plural

STYLES: dict[Status, Style] = {
    "passed": "good", "found": "bad", "failed": "bad", "out of time": "bad", "interrupted": "bad",
}  # fmt: skip


@dataclass(frozen=True)
class CheckupPlan(Result):
    """What a checkup would do, and how long it takes at most."""

    budget: Budget
    setup: str

    def to_dict(self) -> dict[str, Any]:
        limits = self.budget.planned()
        return {
            "minutes": self.budget.minutes,
            "setup": self.setup,
            "parts": [
                {"name": part.name, "does": part.does, "seconds": limits[part.name]} for part in self.budget.parts
            ],
        }

    def blocks(self) -> Iterator[Block]:
        yield Text(f"checkup of {self.setup}: at most {self.budget.minutes:g} minutes", "bold")
        limits = self.budget.planned()
        rows = [(part.name, f"{limits[part.name]:.0f} s", part.does) for part in self.budget.parts]
        caption = "about: its share; a part may take more, and the whole never does"
        yield Table(["part", ">about", "~what it does"], rows, caption=caption)


@dataclass(frozen=True)
class CheckupResult(Result):
    report: CheckupReport
    files: tuple[str, ...] = ()  # that were written

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return self.report.ok

    def to_dict(self) -> dict[str, Any]:
        return report_table(self.report)

    def blocks(self) -> Iterator[Block]:
        report = self.report
        yield Text(f"\n{setup_text(report.setup)}", "bold")
        yield parts_table(report)
        if report.runs:
            yield steps_table(report.runs)
            if extras := extras_table(report.runs):
                yield extras
        for part in report.parts:
            for finding in part.findings:
                yield Text(f"{part.title.lower()}: {finding}", "bad")
        if report.corrections:
            yield Text("\nWhat to correct", "bold")
            for number, sentence in enumerate(report.corrections, 1):
                yield Text(f"{number}. {sentence}")
        yield Text(f"\n{verdict(report)}", "bold" if report.ok else "bad")
        for file in self.files:
            yield Text(file, typed=True)


def report_table(report: CheckupReport) -> dict[str, Any]:
    """The report as JSON has it."""
    table: dict[str, Any] = msgspec.to_builtins(report)
    return {"checkup": table.pop("checkup"), "ok": report.ok, **table}


def verdict(report: CheckupReport) -> str:
    """'all parts passed; 4.2 of 10 minutes'."""
    time = f"{report.seconds / 60:.1f} of {report.minutes:g} minutes"
    bad = [part for part in report.parts if not part.good]
    if not bad:
        left_out = [part.title.lower() for part in report.parts if part.status == "left out"]
        return f"all parts passed{f', without {chr(44).join(left_out)}' if left_out else ''}; {time}"
    return f"{', '.join(f'{part.title.lower()}: {part.status}' for part in bad)}; {time}"


def setup_text(setup: dict[str, Any]) -> str:
    """'8 ranks on 2 nodes: NVIDIA H200, NCCL, torch 2.11.0'."""
    where = f" on {plural(setup['nodes'], 'node')}" if setup["nodes"] > 1 else ""
    shared = " (shared by its ranks)" if setup.get("shared") else ""
    versions = ", ".join(f"{name} {version}" for name, version in setup.get("versions", {}).items())
    return f"{plural(setup['ranks'], 'rank')}{where}: {setup['device']}{shared}, {setup['backend']}, {versions}"


def parts_table(report: CheckupReport) -> Table:
    order = [part.name for part in PARTS]
    rows = []
    for part in sorted(report.parts, key=lambda part: order.index(part.name)):
        seconds = f"{part.seconds:.0f} s" if part.seconds else ""
        first, *more = part.says or [""]
        rows.append([part.title, Cell(part.status, STYLES.get(part.status, "dim")), seconds, first])
        rows += [["", "", "", sentence] for sentence in more]
    return Table(["part", "", ">took", "~"], rows)


def ms(step: LayoutStep | None) -> str:
    return f"{1e3 * step.seconds:.1f}" if step else "-"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f}%"


def steps_table(runs: list[LayoutRun]) -> Table:
    """Measured steps beside those predicted, before and after the calibration."""
    rows = []
    for run in runs:
        measured = ms(run.measured) if run.measured else Cell("out of time" if run.out_of_time else "failed", "bad")
        cells = [
            ms(run.catalogue),
            percent(run.error("catalogue")),
            ms(run.calibrated),
            percent(run.error("calibrated")),
        ]
        rows.append([run.layout, measured, *cells])
    heads = ["~layout", ">measured", ">catalogue", ">off", ">calibrated", ">off"]
    caption = "the planner's best first; predicted with the catalogue's figures, and with those that were measured here"
    return Table(heads, rows, title="ms of a step", caption=caption)


def extras_table(runs: list[LayoutRun]) -> Table | None:
    """Exposed communication and memory, measured and predicted with the calibrated figures."""
    rows = []
    for run in runs:
        predicted = run.calibrated or run.catalogue
        if run.measured is None or predicted is None:
            continue
        cells = [
            *(_ms(step.exposed) for step in (run.measured, predicted)),
            *(_ms(step.bubble) for step in (run.measured, predicted)),
            *(_bytes(step.memory) for step in (run.measured, predicted)),
        ]
        rows.append([run.layout, *cells])
    used = [index for index in range(1, 7) if any(row[index] != "-" for row in rows)]
    if not used:
        return None
    heads = ["~layout", ">exposed", ">planned", ">bubble", ">planned", ">memory", ">planned"]
    caption = "exposed: ms of a step in which ranks wait for collectives; memory: the allocator's, of the fullest rank"
    table = [[row[0], *(row[index] for index in used)] for row in rows]
    return Table(
        [heads[0], *(heads[index] for index in used)], table, title="Communication and memory", caption=caption
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _bytes(size: float | None) -> str:
    return "-" if size is None else bytes_text(size)
