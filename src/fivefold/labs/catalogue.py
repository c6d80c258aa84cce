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
from fivefold.version import __version__

LABS: tuple[Lab, ...] = (LINEAR, ATTENTION, SEQUENCE, DATA_PARALLEL, ZERO, PIPELINE, SCHEDULE, RING, EXPERTS, DECISION)


STATEMENT = "README.md"
_WRITTEN = "\nWritten by Fivefold "


def lab_of(name: str) -> Lab:
    for lab in LABS:
        if lab.name == name:
            return lab
    raise UserError(f"there is no lab {name}; {did_you_mean(name, [lab.name for lab in LABS])}", "lab.unknown")


def lab_in(folder: Path) -> tuple[Lab, Path]:
    """The lab whose file lies in a directory, or is named itself."""
    names = ", ".join(lab.file for lab in LABS)
    if not folder.is_dir():
        found = [lab for lab in LABS if lab.file == folder.name]
        if found and folder.is_file():
            return found[0], folder
        if folder.exists():
            what = f"is not called as the file of a lab is ({names})"
            raise UserError(f"{folder} {what}; rename it, or name the directory", "lab.folder")
    files = [(lab, folder / lab.file) for lab in LABS if (folder / lab.file).is_file()]
    if len(files) == 1:
        return files[0]
    if files:
        several = " and ".join(file.name for _, file in files)
        raise UserError(f"{folder} has {several}; name the file to check", "lab.folder")
    what = f"has no file of a lab ({names})" if folder.is_dir() else "is not there"
    raise UserError(f"{folder} {what}; `fivefold lab start NAME {folder}` writes one", "lab.folder")


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
    texts = {folder / STATEMENT: statement(lab), folder / lab.file: (lab.home / f"starter{lab.suffix}").read_text()}
    try:
        if there := [path for path in (folder, *texts) if path.exists() and (path != folder or not path.is_dir())]:
            raise UserError(f"{there[0]} is there already; name another directory", "lab.exists")
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{folder} cannot be written: {reason}; name another directory", "lab.write") from error
    return StartedLab(lab, tuple(texts))


def statement(lab: Lab) -> str:
    """The statement that a student gets; its last line says which version wrote it."""
    return f"{(lab.home / STATEMENT).read_text()}{_WRITTEN}{__version__}.\n"


def other_statement(lab: Lab, file: Path) -> Iterator[str]:
    """A sentence where the statement beside an answer is that of another version, and not today's."""
    try:
        text, found, version = (file.parent / STATEMENT).read_text().rpartition(_WRITTEN)
    except (OSError, UnicodeDecodeError):
        return
    version = version.strip().removesuffix(".")
    if found and version != __version__ and text != (lab.home / STATEMENT).read_text():
        yield (
            f"{STATEMENT} is the statement of Fivefold {version}, and the check is that of {__version__}: "
            f"`fivefold lab start {lab.name} NEW` writes today's"
        )
