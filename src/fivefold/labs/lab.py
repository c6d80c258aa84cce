"""What a lab is: cases, what each of them has to send, and what its differences mean."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fivefold.foreign.compare import Deviation
from fivefold.labs.messages import LabMessage
from fivefold.render.blocks import Block, Result, Row, Table, Text

HOME = Path(__file__).parent
F64 = 8  # bytes of an element: checks compute in float64


class Hint(NamedTuple):
    """What a difference means in this lab: said after a finding, or a cause, that has all of these words."""

    words: tuple[str, ...]
    sentence: str


class Case(NamedTuple):
    """One model of a lab's check, and the layouts in which it is held against one process."""

    model: str  # an object in the lab's check.py
    layouts: tuple[str, ...]
    about: str  # what is awkward in it
    needs: Callable[[Mapping[str, int]], list[LabMessage]] | None = None  # what a rank has to send in a step, by layout
    probes: Mapping[str, int | None] = MappingProxyType({})  # by name: the dimension in which ranks have parts, or None
    judge: Callable[[Sequence[Sequence[LabMessage]]], str] | None = None  # of the messages, where numbers are right
    # Of what differs and of the messages by rank, before any general cause.
    diagnose: Callable[[Sequence[Deviation], Sequence[Sequence[LabMessage]]], str] | None = None
    hints: tuple[Hint, ...] = ()  # of this case, before those of the lab


def along(axis: str) -> Callable[[int], dict[str, int]]:
    """All ranks along one axis."""
    return lambda ranks: {axis: ranks}


@dataclass(frozen=True)
class FileVerdict(Result):
    """What is said of an answer that is read and not run."""

    name: str
    title: str
    heads: Sequence[str]
    rows: Sequence[Row]
    problems: Sequence[str]

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return not self.problems

    @property
    def summary(self) -> str:
        return f"{self.name} is {'solved' if self.ok else 'not right yet'}"

    def to_dict(self) -> dict[str, Any]:
        heads = [head.lstrip("~>") for head in self.heads]
        rows = [dict(zip(heads, row, strict=True)) for row in self.rows]
        return {
            "lab": self.name,
            "passed": self.ok,
            "summary": self.summary,
            "problems": [*self.problems],
            "rows": rows,
        }

    def blocks(self) -> Iterator[Block]:
        if self.rows:
            yield Table(self.heads, self.rows, title=self.title)
        for problem in self.problems:
            yield Text(problem, "bad")
        yield Text(self.summary, "good" if self.ok else "bad")


@dataclass(frozen=True)
class Lab:
    name: str
    title: str
    teaches: str
    cases: tuple[Case, ...] = ()
    hints: tuple[Hint, ...] = ()
    steps: int = 1
    bench: Callable[[int], dict[str, int]] | None = None  # the layout of so many ranks, in which it is timed
    bubble: Callable[[int], float] | None = None  # of that step, by the simulator
    suffix: str = ".py"
    read: Callable[["Lab", Path], FileVerdict] | None = None  # of an answer that is a file to read

    @property
    def home(self) -> Path:
        """Where its statement, its starter and its check lie."""
        return HOME / self.name

    @property
    def layouts(self) -> int:
        """How many a check runs."""
        return sum(len(case.layouts) for case in self.cases)

    @property
    def file(self) -> str:
        """The student's file."""
        return f"{self.name}{self.suffix}"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "title": self.title, "teaches": self.teaches, "file": self.file}
