"""What was measured on a device, as shares of its maker's ceilings, and the accelerator that comes of it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fivefold.hardware.accelerators import Accelerator
from fivefold.report import Block, Result, Table, Text
from fivefold.support.documents import toml_value
from fivefold.support.formatting import printable


@dataclass(frozen=True)
class Row:
    """One thing that was measured."""

    what: str
    measured: str
    share: float | None = None  # of the maker's ceiling
    median: float | None = None  # error with which the planner's formula gives it back
    worst: float | None = None
    note: str = ""


@dataclass(frozen=True)
class CalibrationResult(Result):
    device: str
    accelerator: Accelerator  # with the fitted constants, for the planner
    rows: list[Row]
    host: float  # seconds to launch a block's forward pass
    samples: dict[str, Any]  # the timings themselves, for JSON

    def to_dict(self) -> Any:
        return {name: msgspec.to_builtins(getattr(self, name)) for name in ("accelerator", "rows", "host", "samples")}

    def blocks(self) -> Iterator[Block]:
        yield Text(f"{self.device}, as {self.accelerator.name}")
        rows = []
        for row in self.rows:
            shares = ("" if x is None else f"{100 * x:.1f}%" for x in (row.share, row.median, row.worst))
            rows.append([row.what, row.measured, *shares, row.note])
        yield Table(["~", ">measured", ">of ceiling", ">error", ">worst", "~"], rows)


def short(value: float) -> float:
    """Four digits: more were not measured."""
    return float(f"{value:.4g}") if math.isfinite(value) else value


def to_toml(accelerator: Accelerator, comments: list[str]) -> str:
    """A file that `Cluster.parse("8xFILE.toml")` reads."""
    return "\n".join([*comment_lines(comments), *table_lines(msgspec.to_builtins(accelerator))]) + "\n"


def comment_lines(comments: Sequence[str]) -> list[str]:
    return [f"# {printable(comment)}" for comment in comments]


def table_lines(table: dict[str, Any], name: str = "") -> Iterator[str]:
    """A table and those inside it, as TOML; what is None is left out."""
    nested = {key: value for key, value in table.items() if isinstance(value, dict)}
    yield from (
        f"{key} = {toml_value(value)}" for key, value in table.items() if key not in nested and value is not None
    )
    for key, values in nested.items():
        inner = f"{name}.{key}".lstrip(".")
        yield from ("", f"[{inner}]", *table_lines(values, inner))
