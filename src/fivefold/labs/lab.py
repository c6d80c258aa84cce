"""What a lab is: cases, what each of them has to send, and what its differences mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fivefold.labs.messages import LabMessage

HOME = Path(__file__).parent
F64 = 8  # bytes of an element: checks compute in float64


class Case(NamedTuple):
    """One model of a lab's check, and the layouts in which it is held against one process."""

    model: str  # an object in the lab's check.py
    layouts: tuple[str, ...]
    about: str  # what is awkward in it
    needs: Callable[[Mapping[str, int]], list[LabMessage]] | None = None  # what a rank has to send in a step, by layout
    probes: Mapping[str, int | None] = MappingProxyType({})  # by name: the dimension in which ranks have parts, or None
    judge: Callable[[Sequence[Sequence[LabMessage]]], str] | None = None  # of the messages, where numbers are right


class Hint(NamedTuple):
    """What a difference means in this lab: said after a finding, or a cause, that has all of these words."""

    words: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Lab:
    name: str
    title: str
    teaches: str
    cases: tuple[Case, ...]
    hints: tuple[Hint, ...] = ()
    steps: int = 1
    bench: str | None = None  # the axis along which its `bench` is timed

    @property
    def home(self) -> Path:
        """Where its statement, its starter and its check lie."""
        return HOME / self.name

    @property
    def file(self) -> str:
        """The student's file."""
        return f"{self.name}.py"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "title": self.title, "teaches": self.teaches, "file": self.file}
