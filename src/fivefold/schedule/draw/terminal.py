"""A schedule in the terminal: one line per rank in colour, and under them what each rank holds.

A column is a slice of time, and shows the action that fills most of it. Without colours, the letters of the kinds stand
in for them. The microbatch is shown where its number fits, so a wider terminal shows more of them.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

from rich.style import Style
from rich.text import Text

from fivefold.report.look import RGB, hexed, mix, text_on
from fivefold.schedule.actions import Action
from fivefold.schedule.draw.palette import HUES, NAMES, colour_of, shade
from fivefold.schedule.schedule import Schedule
from fivefold.schedule.simulate import Shown, Simulation

BARS = " ▁▂▃▄▅▆▇█"
GAP = "┊⋯┊"


def timeline(simulation: Simulation, columns: int = 100, colour: bool = True, left_out: int = 0) -> Text:
    """The picture as styled text, at most `columns` wide. `left_out`: microbatches that the step has in the middle,
    where a gap is shown, and the simulation has not; those after it count on."""
    label = len(f"rank {simulation.schedule.p - 1} ")
    width = max(10, columns - label - 6 - (len(GAP) if left_out else 0))
    slice_ = simulation.makespan / width if simulation.makespan else 1.0
    # Whole columns per action look best: take the largest such width when the schedule is short enough.
    shown = [[*simulation.shown(rank)] for rank in range(simulation.schedule.p)]
    shortest = min((one.end - one.start for spans in shown for one in spans if one.end > one.start), default=1.0)
    per_action = int(shortest / slice_)
    if per_action >= 1:
        slice_ = shortest / per_action
        width = round(simulation.makespan / slice_)

    text = Text()
    for rank in range(simulation.schedule.p):
        text.append(f"rank {rank} ".rjust(label), "dim")
        cells = _columns(shown[rank], width, slice_)
        middle = width // 2 if left_out else width
        for after, part in ((0, cells[:middle]), (left_out, cells[middle:])):
            text.append(GAP if after else "", "dim")
            for span, group in groupby(part):
                cell = _pair if span and span.beside else _cell
                text.append_text(cell(simulation.schedule, _later(span, after), len([*group]), colour))
        text.append("\n")
    text.append("memory\n".rjust(label), "dim")
    most = max(simulation.peak_activations) or 1.0
    for rank, peak in enumerate(simulation.peak_activations):
        text.append(f"rank {rank} ".rjust(label), "dim")
        bars = _bars(simulation.memory[rank], width, slice_, most)
        text.append(f"{bars[:middle]}{GAP if left_out else ''}{bars[middle:]}", Style(color="#5b7fae"))
        text.append(f" {peak:.3g}\n")
    return text


def _later(span: Shown | None, many: int) -> Shown | None:
    """With the number that its microbatch has after so many others."""
    if span is None or not many:
        return span

    def moved(action: Action) -> Action:
        return action._replace(microbatch=action.microbatch + many) if action.microbatch >= 0 else action

    return span._replace(action=moved(span.action), beside=span.beside and moved(span.beside))


def _columns(spans: list[Shown], width: int, slice_: float) -> list[Shown | None]:
    """For each slice of time the action that fills most of it; None where most of it is idle."""
    largest: list[tuple[float, Shown | None]] = [(0.0, None)] * width
    idle = [slice_] * width
    for span in spans:
        for column in range(int(span.start / slice_), min(width, math.ceil(span.end / slice_))):
            share = min(span.end, (column + 1) * slice_) - max(span.start, column * slice_)
            idle[column] -= share
            if share > largest[column][0] + 1e-9 * slice_:
                largest[column] = share, span
    return [span if share >= rest - 1e-9 * slice_ else None for (share, span), rest in zip(largest, idle, strict=True)]


def _cell(schedule: Schedule, span: Shown | None, width: int, colour: bool) -> Text:
    if span is None:
        return Text("·" * width, "dim")
    number = _number(span.action)
    if not colour:
        full = f"{span.action.kind[0]}{number}"
        return Text((full if len(full) <= width else span.action.kind[0]).ljust(width, "-"))
    return Text((number if len(number) <= width else "").center(width), _style(_colour(schedule, span.action)))


def _pair(schedule: Schedule, span: Shown | None, width: int, colour: bool) -> Text:
    """An overlapped pair: the F above the B, their numbers at either end. Without colours, `F5&B2`."""
    assert span is not None
    assert span.beside is not None
    first, second = span.action, span.beside
    one, other = _number(first), _number(second)
    if not colour:
        full = f"{first.kind[0]}{one}&{second.kind[0]}{other}"
        return Text((full if len(full) <= width else "&").ljust(width, "-"))
    above, below = _colour(schedule, first), _colour(schedule, second)
    if len(one) + len(other) >= width:
        one = other = ""
    middle = "▀" * (width - len(one) - len(other))
    both = Style(color=hexed(above), bgcolor=hexed(below))
    return Text.assemble((one, _style(above)), (middle, both), (other, _style(below)))


def _number(action: Action) -> str:
    return str(action.microbatch) if action.microbatch >= 0 else ""


def _colour(schedule: Schedule, action: Action) -> RGB:
    """Neighbours of the same kind touch here, so every other microbatch is a touch darker."""
    background = colour_of(schedule, action)
    return mix(background, (0, 0, 0), 0.16) if action.microbatch % 2 else background


def _style(background: RGB) -> Style:
    return Style(color=text_on(background), bgcolor=hexed(background))


def _bars(steps: list[tuple[float, float]], width: int, slice_: float, most: float) -> str:
    times = [time for time, _ in steps]
    levels = []
    for column in range(width):
        place = bisect_right(times, (column + 0.5) * slice_) - 1
        level = steps[place][1] / most if place >= 0 else 0.0
        levels.append(BARS[round(level * (len(BARS) - 1))])
    return "".join(levels)


def legend(simulations: Sequence[Simulation], colour: bool = True) -> Text:
    """Which colour is which kind of action."""
    present = {span.action.kind for s in simulations for spans in s.timeline for span in spans}
    text = Text()
    if any(one.beside for s in simulations for rank in range(s.schedule.p) for one in s.shown(rank)):
        text.append(" ▀ " if colour else " & ")
        text.append(" an F beside a B   ", "dim")
    for kind in HUES:
        if kind in present:
            background = shade(kind, 0, 1)
            style = Style(color=text_on(background), bgcolor=hexed(background)) if colour else Style()
            text.append(f" {kind} ", style)
            text.append(f" {NAMES[kind]}   ", "dim")
    return text
