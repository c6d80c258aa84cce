"""One harness for all benchmarks: systems take turns, so that the machine's noise affects all of them alike.

    list(turns(("A", "B"), rounds=2))                          # [(0, "A"), (0, "B"), (1, "B"), (1, "A")]
    RoundTimes({"A": [1.0, 2.0], "B": [2.0, 4.0]}).ratio("A", "B")  # 0.5: the median of each round's own ratio

A benchmark has a case (what it measures, on how many ranks), its systems and its result. A result whose systems do not
agree is not ok: systems that compute different things cannot be compared. `rank_timing.py` is the half of the harness
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
OnProgress = Callable[[str], None]  # called with a sentence about what is measured next


class RoundTimes(dict[str, list[float]]):
    """Seconds of every round by system, in the order in which they were taken."""

    def median(self, system: str) -> float:
        return median(self[system])

    def ratio(self, system: str, base: str) -> float:
        return ratio(self[system], self[base])


def ratio(ours: Iterable[float], others: Iterable[float]) -> float:
    """The median over rounds of ours / others: the two times of a round were taken under the same noise."""
    return median(our / other for our, other in zip(ours, others, strict=True))


def turns(systems: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yields (round, system); odd rounds go through the systems in reverse, so that drift favours none of them."""
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
    only_shown: Sequence[dict[str, Any]] = ()  # for each row: values for the table but not the JSON

    def to_dict(self) -> list[dict[str, Any]]:
        return self.rows

    def blocks(self) -> Iterator[Block]:
        only_shown = self.only_shown or [{}] * len(self.rows)
        rows = [row | shown for row, shown in zip(self.rows, only_shown, strict=True)]
        yield table(rows, self.columns, self.caption)


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], caption: str = "") -> Table:
    """A table of `columns`, each `head: "key"` or `head: "key:format"`. Columns without any value are left out."""
    cells = {}
    for head, key_and_format in columns.items():
        key, _, form = key_and_format.partition(":")
        cells[head] = ["" if row.get(key) is None else format(row[key], form) for row in rows]
    filled = {head: texts for head, texts in cells.items() if any(texts)}
    return Table(list(filled), list(zip(*filled.values(), strict=True)), caption=caption)


def caveats(times: Iterable[list[float]], rounds: int, world: int, cores: int) -> Iterator[Block]:
    """How far to trust figures with these `times` of systems."""
    if rounds > 1:
        spread = max(max(seconds) / min(seconds) for seconds in times)
        yield Text(f"noise: the slowest round of a system takes up to {spread:.2f} times its fastest")
    if world > cores:
        yield Text(f"{world} ranks share {cores} cores: no speed-up beyond {cores} is possible here")


ONE_RANK_SENTENCE = "one rank has nothing to compare with"


def refuse(problems: Sequence[str]) -> None:
    """Raise all problems at once, before any process starts."""
    if problems:
        raise UserError(problems, "option.range")


def too_small(**options: int) -> list[str]:
    """A sentence for each option below 1 or above a million, for options that nothing else checks."""
    return [why for name, value in options.items() if (why := misfit(f"--{name}", value, within(1, 1_000_000)))]


def choices(text: str, option: str, known: Sequence[str]) -> list[str]:
    """The words of a comma-separated list, each once; words that are not `known` are refused."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise UserError(f"{option} is empty; leave it out for the default", "option.empty")
    if unknown := [word for word in words if word not in known]:
        raise UserError(f"{option} {unknown[0]} is not a choice; {did_you_mean(unknown[0], known)}", "option.choice")
    return words
