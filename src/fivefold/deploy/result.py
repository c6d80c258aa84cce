"""What `fivefold launch` wrote, how to start it, and what is left to fill in."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fivefold.report import Result, Table, Text


@dataclass(frozen=True)
class LaunchResult(Result):
    kind: str  # slurm | torchrun | kubernetes | trainjob | ssh
    title: str
    nodes: int
    per_node: int
    output: str  # the file; empty: none was asked for, and `text` is shown
    text: str
    start: list[str]  # commands
    fill_in: list[str]
    notes: list[str]
    submitted: str = ""  # the id that Slurm gave it
    follow: tuple[tuple[str, str], ...] = ()  # command, what it shows

    def blocks(self) -> Iterator[Text | Table]:
        yield Text(self.title, "bold")
        if self.output:
            yield Text(f"written to {self.output}")
        else:
            yield Text(self.text.rstrip("\n"), typed=True)
        for sentence in self.fill_in:
            yield Text(f"fill in: {sentence}", "bad")
        for sentence in self.notes:
            yield Text(f"note: {sentence}")
        if self.submitted:
            yield Text(f"submitted as Slurm job {self.submitted}", "good")
        else:
            yield Text("\n".join(["start it:", *(f"  {line}" for line in self.start)]), typed=True)
        if self.follow:
            yield Table(["~command", "~shows"], self.follow)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "nodes": self.nodes,
            "ranks_per_node": self.per_node,
            "output": self.output or None,
            "text": self.text,
            "start": self.start,
            "fill_in": self.fill_in,
            "notes": self.notes,
            "submitted": self.submitted or None,
            "follow": [command for command, _ in self.follow],
        }
