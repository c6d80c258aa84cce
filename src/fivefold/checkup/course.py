"""What the parts of a checkup share: the ranks, the devices, the time that is left, and the report that they fill."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fivefold.checkup.command import CommandEnd
from fivefold.checkup.devices import ChosenModel, Devices
from fivefold.checkup.report import CheckupReport, PartReport, Status
from fivefold.checkup.tasks import Task, TypedJob
from fivefold.checkup.team import Ends, Team
from fivefold.hardware.cluster import Cluster

_LINES = 3  # of an output that a sentence quotes
_QUOTED = 300  # characters of each


class PartEnded(Exception):
    """A part cannot go on: it ran out of time, or a command failed. What it has said until then is kept."""

    def __init__(self, status: Status, sentence: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


@dataclass
class Course:
    """One checkup under way."""

    team: Team
    base: TypedJob
    devices: Devices
    model: ChosenModel | None  # None: the user's own job says it
    token: str  # of the folder with its runs
    report: CheckupReport
    tell: Callable[[str], None] = lambda _: None
    deadline: float = 0.0  # of the part under way, by time.monotonic
    share: float = 0.0  # seconds that the part under way should take
    cluster: Cluster | None = None  # as it was calibrated
    catalogue: Cluster | None = None  # the same machines by the catalogue
    hosts: list[str] = field(default_factory=list)  # names of the nodes, by their first ranks

    @property
    def nodes(self) -> int:
        return -(-self.team.size // self.team.per_node)

    @property
    def left(self) -> float:
        """Seconds of the part under way."""
        return max(0.0, self.deadline - time.monotonic())

    def task(self, **settings: Any) -> Task:
        usual = {"token": self.token, "ranks": self.team.size, "device": self.devices.kind}
        return Task(**{**usual, **settings})

    def run(self, task: Task, limit: float = 0.0) -> Ends:
        """Run a task in the time that is left, or in less."""
        return self.team.run(task, min(limit or self.left, self.left))


def failure(what: str, ends: Ends, fine: tuple[int, ...] = (0,)) -> PartEnded | None:
    """What to raise if a command has not ended well on every rank; `fine` are the codes that count as well."""
    late = [rank for rank, end in ends.items() if not end.in_time]
    bad = [rank for rank, end in ends.items() if end.in_time and end.code not in fine]
    if bad:  # before those that were late: they waited for it
        end = ends[bad[0]]
        return PartEnded("failed", f"{what} ended with code {end.code}{_of(bad, ends)}: {last_words(end)}")
    if late:
        seconds = max(ends[rank].seconds for rank in late)
        said = last_words(ends[late[0]])
        tail = f"; its last words: {said}" if said != "it said nothing" else ""
        return PartEnded("out of time", f"{what} had not ended after {seconds:.0f} s{_of(late, ends)}{tail}")
    return None


def _of(ranks: list[int], ends: Ends) -> str:
    if len(ends) == 1:
        return ""
    return f" on {len(ranks)} of {len(ends)} ranks, the first is rank {ranks[0]}"


def last_words(end: CommandEnd) -> str:
    """What a command that failed said: its errors, else its last lines."""
    lines = [line.strip() for line in [*end.err.splitlines(), *end.out.splitlines()] if line.strip()]
    errors = [line for line in lines if line.startswith("error:")] or [line for line in lines if "Error" in line]
    said = errors[:_LINES] or lines[-_LINES:]
    return " / ".join(line[:_QUOTED] for line in said) or "it said nothing"


def figures_of(what: str, end: CommandEnd) -> Any:
    """The JSON that a command printed, on its last line."""
    for line in reversed(end.out.splitlines()):
        if line.startswith(("{", "[")):
            try:
                return json.loads(line)
            except ValueError:
                break
    raise PartEnded("failed", f"{what} printed no figures: {last_words(end)}")


def out_of_time(report: PartReport, what: str) -> PartEnded:
    return PartEnded("out of time", f"no time was left for {what} ({report.limit:.0f} s for this part)")
