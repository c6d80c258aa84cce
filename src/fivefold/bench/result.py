"""What all benchmarks' results share: a verdict, tables, and sentences about noise and cores."""

from collections.abc import Iterator, Sequence

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


def filled(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """A table without the columns that are empty in every row."""
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    return Table([heads[at] for at in kept], [[row[at] for at in kept] for row in rows], caption=caption)


def optional(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def conditions(times: Times, rounds: int, world: int, cores: int) -> Iterator[Block]:
    """How far to trust the figures."""
    if rounds > 1:
        yield Text(f"noise: the slowest round of a system takes up to {times.spread:.2f} times its fastest")
    if world > cores:
        yield Text(f"{world} ranks share {cores} cores: no speed-up beyond {cores} is possible here")
