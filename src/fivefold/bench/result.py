"""What all benchmarks' results share: a verdict, tables, and sentences about noise and cores."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.bench.harness import Times
from fivefold.report import Block, Result, Table, Text


class BenchResult(Result):
    @property
    def agrees(self) -> bool:
        """Whether all systems computed the same: one that computes something else is not faster."""
        return True

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return self.agrees


@dataclass(frozen=True)
class RowsResult(BenchResult):
    """A benchmark that is one table."""

    rows: list[dict[str, Any]]
    columns: Mapping[str, str]
    caption: str = ""
    beside: Sequence[dict[str, Any]] = ()  # for each row what only the table shows

    def to_dict(self) -> list[dict[str, Any]]:
        return self.rows

    def blocks(self) -> Iterator[Block]:
        beside = self.beside or [{}] * len(self.rows)
        rows = [row | more for row, more in zip(self.rows, beside, strict=True)]
        yield table(rows, self.columns, self.caption)


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], caption: str = "") -> Table:
    """A table of `columns`, each `head: "key"` or `head: "key:format"`. Those without any value are left out."""
    cells = {}
    for head, what in columns.items():
        key, _, form = what.partition(":")
        cells[head] = ["" if row.get(key) is None else format(row[key], form) for row in rows]
    kept = {head: texts for head, texts in cells.items() if any(texts)}
    return Table(list(kept), list(zip(*kept.values(), strict=True)), caption=caption)


def conditions(times: Times, rounds: int, world: int, cores: int) -> Iterator[Block]:
    """How far to trust the figures."""
    if rounds > 1:
        yield Text(f"noise: the slowest round of a system takes up to {times.spread:.2f} times its fastest")
    if world > cores:
        yield Text(f"{world} ranks share {cores} cores: no speed-up beyond {cores} is possible here")
