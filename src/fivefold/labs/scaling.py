"""`fivefold lab bench`: an answer on 1, 2 and 4 ranks, how much of its share each adds, and who waits when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.foreign.adapter import AdapterFile
from fivefold.labs.catalogue import lab_in
from fivefold.labs.checking import answered_by
from fivefold.labs.ends import broken_run, ended
from fivefold.labs.lab import Lab
from fivefold.launch import processes
from fivefold.launch.host import cores
from fivefold.render.blocks import Block, Drawing, Result, Table, Text
from fivefold.render.scene import BLUE, GREY, ORANGE, Rect, Scene, Shape, TextMark
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.ranges import MAX_STEPS, check_range, within

if TYPE_CHECKING:
    from rich.text import Text as RichText

TIMEOUT = 120.0
_WORLDS = (1, 2, 4)
_ROW, _LEFT, _WIDE = 26.0, 60.0, 800.0  # of the picture


class Span(NamedTuple):
    """A time in a message: until it is handed over, or through. Seconds since the step began."""

    start: float
    end: float


class TimedSteps(NamedTuple):
    seconds: list[float]  # of each step; its ranks begin together
    waits: list[Span]  # of the last one: the rank does nothing else
    travels: Sequence[Span] = ()  # of the last one: messages that were handed over and not waited for yet


@dataclass(frozen=True)
class LabBench(Result):
    lab: Lab
    timed: dict[int, list[TimedSteps]]  # by number of ranks

    def seconds(self, world: int) -> float:
        """The median step; a step is as long as its slowest rank."""
        return median(max(step) for step in zip(*(rank.seconds for rank in self.timed[world]), strict=True))

    def efficiency(self, world: int) -> float:
        return self.seconds(1) / world / self.seconds(world)

    def waiting(self, world: int) -> float:
        """Which share of the last step a rank spends in messages, in the mean."""
        shares = [sum(end - start for start, end in rank.waits) / rank.seconds[-1] for rank in self.timed[world]]
        return sum(shares) / len(shares)

    @property
    def timeline_of(self) -> int:
        """The most ranks that have a core each: the timeline of others shows who has the core."""
        return max((world for world in self.timed if world <= max(2, cores())), default=1)

    def to_dict(self) -> dict[str, Any]:
        rows = [{"ranks": world, "seconds": self.seconds(world), "efficiency": self.efficiency(world),
                 "waiting": self.waiting(world), **self._simulated(world)} for world in self.timed]  # fmt: skip
        return {"lab": self.lab.name, "cores": cores(), "rows": rows}

    def _simulated(self, world: int) -> dict[str, float]:
        return {"simulated_bubble": self.lab.bubble(world)} if self.lab.bubble else {}

    def blocks(self) -> Iterator[Block]:
        rows = [
            [str(world), f"{1e3 * self.seconds(world):.1f}", f"{self.seconds(1) / self.seconds(world):.2f} x",
             f"{self.efficiency(world):.0%}", f"{self.waiting(world):.0%}",
             *(f"{share:.0%}" for share in self._simulated(world).values())]
            for world in self.timed
        ]  # fmt: skip
        heads = [">ranks", ">ms a step", ">speed-up", ">efficiency", ">in messages"]
        heads += [">simulated bubble"] if self.lab.bubble else []
        yield Table(heads, rows, title=f"{self.lab.title}: the same work on more ranks")
        if self.timeline_of > 1:
            travels = any(rank.travels for rank in self.timed[self.timeline_of])
            yield Drawing(partial(self._lines, self.timeline_of))
            yield Text(f"one step; █ computes, {'▓ computes while a message travels, ' if travels else ''}░ waits")
        if (most := max(self.timed)) > cores():
            yield Text(f"this machine has {cores()} cores: {most} ranks take turns on them")

    def _lines(self, world: int, width: int, colour: bool) -> "RichText":
        from rich.text import Text as RichText

        columns = max(10, min(width, 100) - 8)
        end = max(rank.seconds[-1] for rank in self.timed[world])
        text = RichText()
        for number, rank in enumerate(self.timed[world]):
            text.append(f"rank {number} ", "dim")
            for column in range(round(columns * rank.seconds[-1] / end)):
                at = (column + 0.5) * end / columns
                waits, travels = (any(a <= at < b for a, b in spans) for spans in (rank.waits, rank.travels))
                text.append("░" if waits else "▓" if travels else "█", "dim" if waits else "blue")
            text.append("\n")
        return text

    def scene(self) -> Scene:
        """The timeline of one step."""
        world = self.timeline_of
        end = max(rank.seconds[-1] for rank in self.timed[world])
        marks: list[Shape] = []
        for number, rank in enumerate(self.timed[world]):
            top = number * _ROW
            marks.append(TextMark(8, top + 13, f"rank {number}", 13.0, "start", GREY))
            marks.append(Rect(_LEFT, top + 3, _WIDE * rank.seconds[-1] / end, _ROW - 6, BLUE))
            for start, stop in rank.waits:
                marks.append(Rect(_LEFT + _WIDE * start / end, top + 3, _WIDE * (stop - start) / end, _ROW - 6, GREY))
            for start, stop in rank.travels:
                marks.append(Rect(_LEFT + _WIDE * start / end, top + _ROW - 7, _WIDE * (stop - start) / end, 4, ORANGE))
        about = f"One step of {self.lab.title} on {world} ranks: blue computes, grey waits, below it messages travel"
        return Scene(_LEFT + _WIDE + 16, world * _ROW + 8, about, marks)


def bench_lab(answer: str | Path, *, rounds: int = 5, ranks: Sequence[int] = _WORLDS) -> LabBench:
    """Time an answer on these numbers of ranks, and one process of PyTorch's own code for 1."""
    check_range("--rounds", rounds, within(1, MAX_STEPS))
    lab, file = lab_in(Path(answer))
    if lab.bench is None:
        raise UserError(f"the lab {lab.name} has nothing to time", "lab.bench")
    check = AdapterFile(lab.home / "check.py", "bench")
    timed = {}
    with answered_by(file) as at:
        for world in ranks:
            layout = {} if world == 1 else lab.bench(world)
            try:
                timed[world] = processes.run(
                    world, "fivefold.labs.timing:measure", check, layout, rounds, timeout=TIMEOUT
                )
            except processes.RankError as error:
                raise TrainingError(_untimed(ended(broken_run(error), lab.file, at), answer)) from error
            except UserError as error:
                first, *_ = error.problems
                raise UserError(_untimed(first, answer), error.codes[0]) from error
    return LabBench(lab, timed)


def _untimed(why: str, answer: str | Path) -> str:
    return f"{why}; nothing is timed: run `fivefold lab check {answer}` first"
