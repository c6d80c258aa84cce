"""A schedule in the terminal: one line per rank in colour, and under them what each rank holds.

A column is a slice of time, and shows the action that fills most of it. Without colours, the letters of the kinds
stand in for them. The microbatch is shown where its number fits, so a wider terminal shows more of them.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

from rich.style import Style
from rich.text import Text

from fivefold.render.scene import RGB, hexed, mix, text_on
from fivefold.schedules.actions import ALL_MICROBATCHES, Action
from fivefold.schedules.palette import KIND_COLOURS, KIND_NAMES, colour_of, shade
from fivefold.schedules.schedule import Schedule
from fivefold.schedules.simulate import DrawnSpan, Simulation

BAR_LEVELS = " ▁▂▃▄▅▆▇█"
LEFT_OUT = "┊⋯┊"


def timeline(simulation: Simulation, columns: int = 100, colour: bool = True, left_out: int = 0) -> Text:
    """The picture as styled text, at most `columns` wide.

    `left_out` is the number of microbatches from the middle of the step that were not simulated: a gap shows where
    they would be, and the numbers after it are higher by so many.
    """
    label = len(f"rank {simulation.schedule.p - 1} ")
    width = max(10, columns - label - 6 - (len(LEFT_OUT) if left_out else 0))
    column_time = simulation.makespan / width if simulation.makespan else 1.0
    # Whole columns per action look best: take the largest such width when the schedule is short enough.
    shown = [[*simulation.drawn(rank)] for rank in range(simulation.schedule.p)]
    shortest = min((span.end - span.start for spans in shown for span in spans if span.end > span.start), default=1.0)
    per_action = int(shortest / column_time)
    if per_action >= 1:
        column_time = shortest / per_action
        width = round(simulation.makespan / column_time)

    text = Text()
    for rank in range(simulation.schedule.p):
        text.append(f"rank {rank} ".rjust(label), "dim")
        cells = _columns(shown[rank], width, column_time)
        middle = width // 2 if left_out else width
        for offset, part in ((0, cells[:middle]), (left_out, cells[middle:])):
            text.append(LEFT_OUT if offset else "", "dim")
            for span, group in groupby(part):
                cell = _pair if span and span.beside else _cell
                text.append_text(cell(simulation.schedule, _renumbered(span, offset), len([*group]), colour=colour))
        text.append("\n")
    text.append("memory\n".rjust(label), "dim")
    highest = max(simulation.peak_activations) or 1.0
    for rank, peak in enumerate(simulation.peak_activations):
        text.append(f"rank {rank} ".rjust(label), "dim")
        bars = _bars(simulation.memory[rank], width, column_time, highest)
        text.append(f"{bars[:middle]}{LEFT_OUT if left_out else ''}{bars[middle:]}", Style(color="#5b7fae"))
        text.append(f" {peak:.3g}\n")
    return text


def legend(simulations: Sequence[Simulation], *, colour: bool = True) -> Text:
    """Which colour is which kind of action."""
    present = {span.action.kind for s in simulations for spans in s.timeline for span in spans}
    text = Text()
    if any(span.beside for s in simulations for rank in range(s.schedule.p) for span in s.drawn(rank)):
        text.append(" ▀ " if colour else " & ")
        text.append(" an F beside a B   ", "dim")
    for kind in KIND_COLOURS:
        if kind in present:
            background = shade(kind, 0, 1)
            style = Style(color=text_on(background), bgcolor=hexed(background)) if colour else Style()
            text.append(f" {kind} ", style)
            text.append(f" {KIND_NAMES[kind]}   ", "dim")
    return text


def _renumbered(span: DrawnSpan | None, offset: int) -> DrawnSpan | None:
    """The span with `offset` added to the number of its microbatch."""
    if span is None or not offset:
        return span

    def moved(action: Action) -> Action:
        return (
            action._replace(microbatch=action.microbatch + offset) if action.microbatch != ALL_MICROBATCHES else action
        )

    return span._replace(action=moved(span.action), beside=span.beside and moved(span.beside))


def _columns(spans: list[DrawnSpan], width: int, column_time: float) -> list[DrawnSpan | None]:
    """For each column, which is `column_time` long, the action that fills most of it; None where most is idle."""
    largest: list[tuple[float, DrawnSpan | None]] = [(0.0, None)] * width
    idle = [column_time] * width
    for span in spans:
        for column in range(int(span.start / column_time), min(width, math.ceil(span.end / column_time))):
            time = min(span.end, (column + 1) * column_time) - max(span.start, column * column_time)
            idle[column] -= time
            if time > largest[column][0] + 1e-9 * column_time:
                largest[column] = time, span
    return [
        span if time >= rest - 1e-9 * column_time else None for (time, span), rest in zip(largest, idle, strict=True)
    ]


def _cell(schedule: Schedule, span: DrawnSpan | None, width: int, *, colour: bool) -> Text:
    """An action in so many columns, or idle time."""
    if span is None:
        return Text("·" * width, "dim")
    number = _number(span.action)
    if not colour:
        full = f"{span.action.kind[0]}{number}"
        return Text((full if len(full) <= width else span.action.kind[0]).ljust(width, "-"))
    return Text((number if len(number) <= width else "").center(width), _style(_colour(schedule, span.action)))


def _pair(schedule: Schedule, span: DrawnSpan | None, width: int, *, colour: bool) -> Text:
    """An overlapped pair: the F above the B, their numbers at either end. Without colours, `F5&B2`."""
    assert span is not None
    assert span.beside is not None
    forward, backward = span.action, span.beside
    left, right = _number(forward), _number(backward)
    if not colour:
        full = f"{forward.kind[0]}{left}&{backward.kind[0]}{right}"
        return Text((full if len(full) <= width else "&").ljust(width, "-"))
    upper, lower = _colour(schedule, forward), _colour(schedule, backward)
    if len(left) + len(right) >= width:
        left = right = ""
    middle = "▀" * (width - len(left) - len(right))
    halves = Style(color=hexed(upper), bgcolor=hexed(lower))
    return Text.assemble((left, _style(upper)), (middle, halves), (right, _style(lower)))


def _number(action: Action) -> str:
    return str(action.microbatch) if action.microbatch != ALL_MICROBATCHES else ""


def _colour(schedule: Schedule, action: Action) -> RGB:
    """The colour of a cell. No line parts neighbours of the same kind, so every other microbatch is a bit darker."""
    background = colour_of(schedule, action)
    return mix(background, (0, 0, 0), 0.16) if action.microbatch % 2 else background


def _style(background: RGB) -> Style:
    return Style(color=text_on(background), bgcolor=hexed(background))


def _bars(steps: list[tuple[float, float]], width: int, column_time: float, highest: float) -> str:
    """Live activations as bars; `steps` are (time, activations from then on), a full bar is `highest`."""
    times = [time for time, _ in steps]
    bars = []
    for column in range(width):
        place = bisect_right(times, (column + 0.5) * column_time) - 1
        level = steps[place][1] / highest if place >= 0 else 0.0
        bars.append(BAR_LEVELS[round(level * (len(BAR_LEVELS) - 1))])
    return "".join(bars)
