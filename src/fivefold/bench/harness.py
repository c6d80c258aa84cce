"""One harness for all benchmarks: systems take turns, so that all of them meet the same noise.

    list(turns(("A", "B"), rounds=2))                          # [(0, "A"), (0, "B"), (1, "B"), (1, "A")]
    RoundTimes({"A": [1.0, 2.0], "B": [2.0, 4.0]}).ratio("A", "B")  # 0.5: the median of each round's own ratio

A benchmark has a case (what it measures, on how many ranks), its systems and its result. A result whose systems do not
agree is not ok: one that computes something else is not faster. `systems.py` begins with the half of the harness
that runs on ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.support.errors import UserError
from fivefold.support.ranges import misfit, within
from fivefold.support.text import did_you_mean

OURS = "fivefold"
HUGGING_FACE = "Hugging Face"
OnProgress = Callable[[str], None]  # hears what is measured next


class RoundTimes(dict[str, list[float]]):
    """Seconds of every round by system, in the order in which they were taken."""

    def median(self, system: str) -> float:
        return median(self[system])

    def ratio(self, system: str, base: str) -> float:
        return ratio(self[system], self[base])


def ratio(ours: Iterable[float], others: Iterable[float]) -> float:
    """The median of each round's own ratio: both sides of it have met the same noise."""
    return median(our / other for our, other in zip(ours, others, strict=True))


def turns(systems: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, system), forwards in one round and backwards in the next: drift favours no place in the order."""
    order = list(systems)
    return ((number, system) for number in range(rounds) for system in order[:: -1 if number % 2 else 1])


@dataclass(frozen=True)
class Machine:
    """Where a benchmark ran."""

    cores: int
    torch: str  # version
    name: str


@dataclass(frozen=True)
class RowsResult(Result):
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


def caveats(times: Iterable[list[float]], rounds: int, world: int, cores: int) -> Iterator[Block]:
    """How far to trust the figures of systems with these `times`."""
    if rounds > 1:
        spread = max(max(seconds) / min(seconds) for seconds in times)
        yield Text(f"noise: the slowest round of a system takes up to {spread:.2f} times its fastest")
    if world > cores:
        yield Text(f"{world} ranks share {cores} cores: no speed-up beyond {cores} is possible here")


def refuse(problems: Sequence[str]) -> None:
    """Raise all problems at once, before any process starts."""
    if problems:
        raise UserError(problems)


def too_small(**options: int) -> list[str]:
    """Or too large, for numbers that nothing else judges."""
    return [why for name, value in options.items() if (why := misfit(f"--{name}", value, within(1, 1_000_000)))]


def choices(text: str, option: str, known: Sequence[str]) -> list[str]:
    """The words of a list with commas, each once."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise UserError(f"{option} is empty; leave it out for the default")
    if unknown := [word for word in words if word not in known]:
        raise UserError(f"{option} {unknown[0]} is not a choice; {did_you_mean(unknown[0], known)}")
    return words
