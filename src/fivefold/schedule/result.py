"""`draw`: schedules proven, timed and drawn, as a result for the terminal, scripts and notebooks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text as RichText

from fivefold.report import Block, Drawing, Result, Text
from fivefold.schedule.check import prove
from fivefold.schedule.compare import Wish
from fivefold.schedule.draw import legend, picture, to_svg, to_terminal
from fivefold.schedule.schedule import Schedule
from fivefold.schedule.simulate import Simulation, simulate
from fivefold.schedule.tables import details, figures, summary
from fivefold.schedule.times import Times, parse_slow
from fivefold.support.errors import UserError


@dataclass(frozen=True)
class DrawResult(Result):
    """Schedules on a clock: `simulations` has the timeline, the bubble and the memory of each."""

    simulations: tuple[Simulation, ...]

    def blocks(self) -> Iterator[Block]:
        for simulation in self.simulations:
            schedule = simulation.schedule
            yield Text(f"{schedule.name}  p={schedule.p} m={schedule.m}  {summary(simulation)}", "bold")
            yield Drawing(partial(_drawn, simulation))
        yield Drawing(lambda _, colour: _ansi(legend(list(self.simulations), colour), colour))

    def to_dict(self) -> dict[str, Any]:
        rows = [figures(simulation) | details(simulation) for simulation in self.simulations]
        return rows[0] if len(rows) == 1 else {"schedules": rows}

    def svg(self) -> str:
        return to_svg(picture(self.simulations))


def draw(
    *schedules: str | Path | Schedule,
    pp: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    group: int | None = None,
    memory: int | None = None,
    times: str | Times = "",
    slow: str | Mapping[int, float] = "",
    sends: Literal["eager", "blocking"] = "eager",
    overlap: bool = True,
) -> DrawResult:
    """Draw schedules: which rank computes what when, where the bubbles are, and what each rank holds.

        draw("zb-v", pp=4, microbatches=8)
        draw("1f1b", "zb-h1", pp=4, microbatches=8, slow={1: 1.5})    # compared on one time scale

    A schedule is a name, a file or an object, and is proven before it is drawn. `times` are durations of a whole rank,
    like "f=1,i=1,w=1,comm=0.1"; `slow` says how many times as long a rank takes.
    """
    if not schedules:
        raise UserError("there is no schedule to draw; give a name, for example '1f1b', a file or a Schedule")
    names = tuple(str(one) for one in schedules if not isinstance(one, Schedule))
    if isinstance(times, str):
        factors = parse_slow(slow) if isinstance(slow, str) else slow
        times = Times(Times.parse(times).values, factors, sends, overlap)
    wish = Wish(names, pp, microbatches, chunks, group, memory, times)
    return DrawResult(tuple(_timed(one, wish) for one in schedules))


def schedule(name: str | Path, pp: int | None = None, microbatches: int | None = None, **options: Any) -> Schedule:
    """A schedule of the catalogue for `pp` ranks, or the one in a file, proven; `options` are those of `draw`."""
    return draw(name, pp=pp, microbatches=microbatches, **options).simulations[0].schedule


def _timed(schedule: str | Path | Schedule, wish: Wish) -> Simulation:
    if isinstance(schedule, Schedule):
        return simulate(prove(schedule), wish.times.costs(schedule.placement))
    return wish.simulate(str(schedule))


def _drawn(simulation: Simulation, width: int, colour: bool) -> str:
    return _ansi(to_terminal(simulation, width, colour), colour)


def _ansi(text: RichText, colour: bool) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=colour, color_system="truecolor" if colour else None, width=100_000)
    console.print(text, no_wrap=True, crop=False, end="")
    return out.getvalue()
