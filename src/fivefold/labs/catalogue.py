"""The labs, in the order in which they build on each other, and the directories of those who solve them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.labs.attention.lab import LAB as ATTENTION
from fivefold.labs.data_parallel.lab import LAB as DATA_PARALLEL
from fivefold.labs.decision.lab import LAB as DECISION
from fivefold.labs.experts.lab import LAB as EXPERTS
from fivefold.labs.lab import Lab
from fivefold.labs.linear.lab import LAB as LINEAR
from fivefold.labs.pipeline.lab import LAB as PIPELINE
from fivefold.labs.ring.lab import LAB as RING
from fivefold.labs.schedule.lab import LAB as SCHEDULE
from fivefold.labs.sequence.lab import LAB as SEQUENCE
from fivefold.labs.zero.lab import LAB as ZERO
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean

LABS: tuple[Lab, ...] = (LINEAR, ATTENTION, SEQUENCE, DATA_PARALLEL, ZERO, PIPELINE, SCHEDULE, RING, EXPERTS, DECISION)


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


@dataclass(frozen=True)
class Labs(Result):
    """The labs, in order."""

    def to_dict(self) -> dict[str, Any]:
        return {"labs": [lab.describe() for lab in LABS]}

    def blocks(self) -> Iterator[Block]:
        yield Table(["lab", "~what you write", "~what you learn"], [[lab.name, lab.title, lab.teaches] for lab in LABS])
        yield Text(f"fivefold lab start {LABS[0].name} my-lab", typed=True)


def labs() -> Labs:
    """What `fivefold lab` lists."""
    return Labs()


@dataclass(frozen=True)
class StartedLab(Result):
    """A lab whose files were written."""

    lab: Lab
    files: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"lab": self.lab.name, "files": [str(file) for file in self.files]}

    def blocks(self) -> Iterator[Block]:
        statement, answer = self.files
        yield Text(f"{self.lab.title}: read {statement}, fill in {answer}, then")
        yield Text(f"fivefold lab check {answer.parent}", typed=True)


def start_lab(name: str, folder: Path) -> StartedLab:
    """Write a lab's statement and starter into a directory; nothing that lies there is replaced."""
    lab = lab_of(name)
    places = {"README.md": folder / "README.md", f"starter{lab.suffix}": folder / lab.file}
    if there := [path for path in places.values() if path.exists()]:
        raise UserError(f"{there[0]} is there already; name another directory", "lab.exists")
    folder.mkdir(parents=True, exist_ok=True)
    for source, path in places.items():
        path.write_text((lab.home / source).read_text())
    return StartedLab(lab, tuple(places.values()))
