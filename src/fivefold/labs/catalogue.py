"""The labs, in the order in which they build on each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean

HOME = Path(__file__).parent
Sums = Mapping[str, tuple[int, int]]  # kind of a collective -> calls and bytes


class Case(NamedTuple):
    """One model of a lab's check, and the layouts in which it is held against one process."""

    model: str  # an object in the lab's check.py
    layouts: tuple[str, ...]
    about: str  # what is awkward in it
    needs: Callable[[Mapping[str, int]], Sums] | None = None  # what a layout's step has to send: its closed form


class Hint(NamedTuple):
    """What a difference means in this lab: said instead of the general cause if all of its words are in that."""

    words: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Lab:
    name: str
    title: str
    teaches: str
    cases: tuple[Case, ...]
    hints: tuple[Hint, ...] = ()

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


F64 = 8  # bytes of an element: checks compute in float64
B, S, D = 2, 6, 16  # sequences, tokens and width of the checks' models; with H heads


def two_sums(layout: Mapping[str, int]) -> Sums:
    """Forward one all-reduce of the output, backward one of the input's gradient."""
    return {"all-reduce": (2, 2 * B * S * D * F64)}


def gathers_and_scatters(layout: Mapping[str, int]) -> Sums:
    """Forward an all-gather of the input and a reduce-scatter of the output, backward the same the other way round;
    and the two weights and biases of norms, which see a part of the tokens."""
    whole = B * S * D * F64
    return {"all-gather": (2, 2 * whole), "reduce-scatter": (2, 2 * whole), "all-reduce": (1, 2 * D * F64)}


REDUCED_TWICE = "is reduced twice: it is summed over ranks that hold the whole sum already"
LABS = (
    Lab(
        "linear",
        "Column- and row-parallel linear layers",
        "which dimension of a weight is sharded, and which of the two needs a sum",
        (
            Case("mlp", ("tp=2", "tp=4"), "an MLP: one layer of each kind, with biases", two_sums),
            Case("thin", ("tp=2", "tp=4"), "one sequence, a hidden width of 12 and an output of 5", None),
        ),
        (
            Hint(("second.bias", "= tp"), "the bias of the row-parallel layer is added on every rank, so the sum has it tp "
                                          "times: add it once, after the all-reduce"),
            Hint(("gradients (x", "missing SUM"), "each rank has the part of the input's gradient that its output features "
                 "give; the column-parallel layer has to sum them over tp in backward"),
        ),
    ),
)  # fmt: skip


def lab_of(name: str) -> Lab:
    for lab in LABS:
        if lab.name == name:
            return lab
    raise UserError(f"there is no lab {name}; {did_you_mean(name, [lab.name for lab in LABS])}", "lab.unknown")


def lab_in(folder: Path) -> tuple[Lab, Path]:
    """The lab whose file lies in a directory, or is named itself."""
    if folder.is_file():
        found = [lab for lab in LABS if lab.file == folder.name]
        if found:
            return found[0], folder
    files = [(lab, folder / lab.file) for lab in LABS if (folder / lab.file).is_file()]
    if len(files) == 1:
        return files[0]
    names = ", ".join(lab.file for lab in LABS)
    if files:
        several = " and ".join(file.name for _, file in files)
        raise UserError(f"{folder} has {several}; name the file to check", "lab.folder")
    raise UserError(
        f"{folder} has no file of a lab ({names}); `fivefold lab start NAME {folder}` writes one", "lab.folder"
    )
