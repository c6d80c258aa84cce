"""Draws simulations: the timeline of each rank, and underneath what it holds in memory; as a scene, or as text.

Several simulations share one time scale, so that a longer schedule looks longer. They stand below each other as long
as the picture stays wider than it is high, and otherwise in columns: it is for a slide.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

from rich.style import Style
from rich.text import Text

from fivefold.render.chart import round_step
from fivefold.render.scene import (
    BLUE,
    GREEN,
    GREY,
    HELD,
    HELD_EDGE,
    INK,
    ORANGE,
    PURPLE,
    RGB,
    Area,
    Hatch,
    Line,
    Rect,
    Scene,
    TextMark,
    cut,
    hexed,
    mix,
    rgb,
    text_on,
    text_width,
)
from fivefold.schedules.actions import ALL, BACKWARD, FORWARD, INPUT_GRAD, STEP, WEIGHT_GRAD, Action, Kind
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.schedule import Schedule
from fivefold.schedules.simulate import Shown, Simulation
from fivefold.support.text import figure

# ---- palette --------------------------------------------------------------------------------------------------------
# The colours of actions: one hue per kind, one shade per chunk.


HUES: dict[Kind, RGB] = {
    FORWARD: rgb(BLUE),
    BACKWARD: rgb(GREEN),
    INPUT_GRAD: rgb(ORANGE),
    WEIGHT_GRAD: rgb(PURPLE),
    STEP: (90, 98, 110),
}
NAMES: dict[Kind, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRAD: "input gradient",
    WEIGHT_GRAD: "weight gradient",
    STEP: "optimizer",
}
LIGHTEST = 0.68  # how far the last chunk's shade goes towards white


def shade(kind: Kind, chunk: int, chunks: int) -> RGB:
    """The colour of an action: full for chunk 0, lighter chunk by chunk."""
    lighter = LIGHTEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    return mix(HUES[kind], (255, 255, 255), lighter)


def colour_of(schedule: Schedule, action: Action) -> RGB:
    placement = schedule.placement
    return shade(action.kind, placement.chunk[action.stage], placement.chunks)


# ---- picture --------------------------------------------------------------------------------------------------------


LEFT, RIGHT, TOP, BOTTOM = 62.0, 58.0, 22.0, 14.0  # margins
HEAD, AXIS, CAPTION, GAP = 50.0, 30.0, 18.0, 28.0  # heights: title, time axis, memory's caption, between schedules
NARROWEST, WIDEST, CELL = 940.0, 2600.0, 13.0  # widths of the time axis, and of a short action where there is room
COMFORTABLE = 1400.0  # a wider picture will be shown smaller, so its type grows with it
LANDSCAPE = 1.25  # how much wider than high a comparison is
LEGIBLE = 8.0  # the smallest type that is printed, where the picture is shown COMFORTABLE wide
CHUNKS_ARE_SHADES = "shades are chunks:"
MANY = 20_000  # actions: more are drawn without numbers and hints, which would be most of the file
BOLD = 1.12  # how much wider bold type is


def picture(simulations: Sequence[Simulation], many: int = MANY, clock: str = "time") -> Scene:
    """One panel per simulation, on a common time scale; actions are labelled unless there are too many of them.

    `clock` is what the time axis counts: "seconds", or "time" in whatever unit the durations were given.
    """
    labelled = sum(len(spans) for simulation in simulations for spans in simulation.timeline) <= many
    scenes = []
    for columns in range(1, len(simulations) + 1):
        scenes.append(_scene(simulations, columns, labelled, clock))
        if scenes[-1].width >= LANDSCAPE * scenes[-1].height:
            return scenes[-1]
    return scenes[0] if len(scenes) == 1 else max(scenes, key=lambda scene: scene.width / scene.height)


def _scene(simulations: Sequence[Simulation], columns: int, labelled: bool, clock: str) -> Scene:
    """The panels in so many columns, row by row."""
    longest = max(simulation.makespan for simulation in simulations)
    short = min(_short_action(simulation) for simulation in simulations)
    narrowest = NARROWEST if len(simulations) == 1 else COMFORTABLE
    total = min(WIDEST, max(narrowest, columns * CELL * longest / short))  # width of a row's time axes in sum
    unit, width = max(1.0, total / COMFORTABLE), total / columns
    scale = width / longest if longest else 1.0
    panels = [_Panel(simulation, width, scale, unit, labelled, clock) for simulation in simulations]
    rows = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    heights = [max(panel.height for panel in row) for row in rows]
    height = sum(heights) + unit * (TOP + GAP * (len(rows) - 1) + BOTTOM)
    names = ", ".join(simulation.schedule.name for simulation in simulations)
    scene = Scene(columns * (width + unit * (LEFT + RIGHT)), height, names)
    y = TOP * unit
    for row, row_height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            panel.left += column * (width + unit * (LEFT + RIGHT))
            panel.paint(scene, y)
        y += row_height + GAP * unit
    return scene


def _short_action(simulation: Simulation) -> float:
    """How long a short action takes: a tenth of them are shorter."""
    lengths = sorted(end - start for spans in simulation.timeline for _, start, end in spans if end > start)
    return lengths[len(lengths) // 10] if lengths else 1.0


class _Panel:
    """One schedule: title, rows of actions, time axis, rows of memory. `unit` scales type and what is sized by it."""

    def __init__(
        self, simulation: Simulation, width: float, scale: float, unit: float, labelled: bool, clock: str
    ) -> None:
        self.simulation, self.width, self.scale, self.unit = simulation, width, scale, unit
        self.labelled, self.clock = labelled, clock
        self.left_out = not labelled  # whether an action goes without its number
        self.schedule = simulation.schedule
        self.p = self.schedule.p
        self.left = LEFT * unit
        self.row = unit * (27.0 if self.p <= 8 else 20.0 if self.p <= 16 else 14.0)
        self.memory_row = unit * (24.0 if self.p <= 8 else 14.0 if self.p <= 16 else 9.0)
        self.font = self.number_size()

    @property
    def end(self) -> float:
        return self.left + self.simulation.makespan * self.scale

    @property
    def height(self) -> float:
        return self.unit * (HEAD + AXIS + CAPTION) + self.p * (self.row + self.memory_row)

    def number_size(self) -> float:
        """The size of the microbatch numbers: as large as a short action allows, but legible."""
        cell, largest = _short_action(self.simulation) * self.scale, min(11.0 * self.unit, 0.62 * self.row)
        return max(LEGIBLE * self.unit, min(largest, (cell - 3.0) / (0.56 * len(str(self.schedule.m - 1)))))

    def paint(self, scene: Scene, y: float) -> None:
        self.paint_head(scene, y, room=self.paint_legend(scene, y) - self.left)
        y += HEAD * self.unit
        for rank in range(self.p):
            self.paint_rank(scene, rank, y + rank * self.row)
        y += self.p * self.row
        self.paint_axis(scene, y)
        self.paint_memory(scene, y + self.unit * (AXIS + CAPTION))

    # ---- head ------------------------------------------------------------------------------------------------------

    def paint_head(self, scene: Scene, y: float, room: float) -> None:
        simulation, schedule, u = self.simulation, self.schedule, self.unit
        chunks = schedule.placement.chunks
        numbers = f"p={schedule.p}  m={schedule.m}" + (f"  v={chunks}" if chunks > 1 else "")
        name = cut(schedule.name, 17 * u, (room - text_width(numbers, 12 * u) - 28 * u) / BOLD)
        beside = self.left + BOLD * text_width(name, 17 * u) + 14 * u
        figures = (
            f"makespan {figure(simulation.makespan)}   ·   bubble {simulation.bubble_makespan:.1%} of the makespan, "
            f"{simulation.bubble_span:.1%} of the span   ·   peak {figure(max(simulation.peak_activations))} A"
        )
        scene.shapes += (
            TextMark(self.left, y + 4 * u, name, 17 * u, bold=True),
            TextMark(beside, y + 5 * u, numbers, 12 * u, fill=GREY),
            TextMark(self.left, y + 27 * u, figures, 12 * u),
        )

    def paint_legend(self, scene: Scene, y: float) -> float:
        """Paint the legend, right-aligned and therefore from the right; returns the x where it begins."""
        u, chunks = self.unit, self.schedule.placement.chunks
        size, box = 11 * u, 11 * u
        x = self.left + self.width
        present = {span.action.kind for spans in self.simulation.timeline for span in spans}
        legend: list[tuple[str, Kind | None]] = [("idle", None)]
        legend += [(f"{kind} {NAMES[kind]}", kind) for kind in reversed(HUES) if kind in present]
        for name, kind in legend:
            x -= text_width(name, size) + 2 * u
            scene.shapes.append(TextMark(x, y + 4 * u, name, size, fill=GREY))
            shades = 1 if kind in (None, STEP) else chunks
            x -= 5 * u + box * shades
            if kind is None:
                scene.shapes.append(Hatch(x, y - 1.5 * u, box, box))
            else:
                colours = [hexed(shade(kind, chunk, shades)) for chunk in range(shades)]
                scene.shapes += [Rect(x + box * k, y - 1.5 * u, box, box, c) for k, c in enumerate(colours)]
            x -= 14 * u
        if chunks > 1:
            scene.shapes.append(TextMark(x, y + 4 * u, CHUNKS_ARE_SHADES, size, "end", GREY))
            x -= text_width(CHUNKS_ARE_SHADES, size)
        return x

    # ---- rows ------------------------------------------------------------------------------------------------------

    def paint_rank(self, scene: Scene, rank: int, y: float) -> None:
        size = min(12.0 * self.unit, 0.7 * self.row)
        scene.shapes.append(TextMark(self.left - 10 * self.unit, y + self.row / 2, f"rank {rank}", size, "end", GREY))
        inner = self.row - (3.0 if self.row > 15 else 2.0)
        scene.shapes.append(Hatch(self.left, y, self.end - self.left, inner))
        for action, start, end, beside in self.simulation.shown(rank):
            self.paint_span(scene, BusySpan(action, start, end), y, inner / 2 if beside else inner)
            if beside:
                self.paint_span(scene, BusySpan(beside, start, end), y + inner / 2, inner / 2)

    def paint_span(self, scene: Scene, span: BusySpan, y: float, height: float) -> None:
        action, start, end = span
        x, width = self.left + start * self.scale, (end - start) * self.scale
        if width <= 0:
            return
        colour = colour_of(self.schedule, action)
        seam = min(1.0, 0.12 * width)  # a hair of paper between neighbours
        hint = f"{action}  {figure(start)} - {figure(end)}" if self.labelled else ""
        scene.shapes.append(Rect(x, y, width - seam, height, hexed(colour), hint))
        if self.labelled and action.microbatch != ALL:
            number = TextMark(x + (width - seam) / 2, y + height / 2, str(action.microbatch), self.font, "middle")
            self.paint_number(scene, number._replace(fill=text_on(colour)), width, height)

    def paint_number(self, scene: Scene, number: TextMark, width: float, height: float) -> None:
        """Paint the microbatch if the longest number fits, so that all actions of one width show theirs, or none."""
        longest = str(self.schedule.m - 1)
        size = min(number.size, 0.82 * height, (width - 1.5) / text_width(longest, 1.0))
        if size >= LEGIBLE * self.unit * (1 - 1e-9):
            scene.shapes.append(number._replace(size=size))
        else:
            self.left_out = True

    def paint_axis(self, scene: Scene, y: float) -> None:
        u, makespan = self.unit, self.simulation.makespan
        scene.shapes.append(Line(self.left, y + 2 * u, self.end, y + 2 * u))
        scene.shapes.append(TextMark(self.left - 10 * u, y + 14 * u, self.clock, 11 * u, "end", GREY))
        step = round_step(makespan, self.width / (90 * u))
        for tick in range(int(makespan / step + 1e-9) + 1 if step else 0):
            x = self.left + tick * step * self.scale
            scene.shapes.append(Line(x, y + 2 * u, x, y + 6 * u))
            if self.end - x > 34 * u:
                scene.shapes.append(TextMark(x, y + 14 * u, figure(tick * step), 10 * u, "middle", GREY))
        scene.shapes.append(Line(self.end, y - self.p * self.row, self.end, y + 6 * u, INK, 1.2))
        scene.shapes.append(TextMark(self.end, y + 14 * u, figure(makespan), 11 * u, "middle", INK, bold=True))

    # ---- memory ----------------------------------------------------------------------------------------------------

    def paint_memory(self, scene: Scene, y: float) -> None:
        u, peaks = self.unit, self.simulation.peak_activations
        caption = "live activations, in microbatches of a whole rank (A)"
        scene.shapes.append(TextMark(self.left, y - 10 * u, caption, 11 * u, fill=GREY))
        if self.left_out:
            why = "numbers only where they can be read" if self.labelled else "too many actions to number them"
            scene.shapes.append(TextMark(self.left + self.width, y - 10 * u, why, 11 * u, "end", GREY))
        inner, size = self.memory_row - 3.0, min(11.0 * u, 0.72 * self.memory_row)
        for rank, peak in enumerate(peaks):
            base = y + (rank + 1) * self.memory_row - 1.0
            middle = base - inner / 2
            scene.shapes.append(TextMark(self.left - 10 * u, middle, f"rank {rank}", size, "end", GREY))
            scene.shapes.append(Line(self.left, base, self.end, base))
            curve = self.curve(self.simulation.memory[rank], base, inner / (max(peaks) or 1.0))
            if curve:
                scene.shapes.append(Area(curve, HELD, HELD_EDGE))
            scene.shapes.append(TextMark(self.end + 8 * u, middle, figure(peak), size, "start", INK))

    def curve(self, steps: list[tuple[float, float]], base: float, height: float) -> tuple[tuple[float, float], ...]:
        """The outline of a step function, from the axis and back to it."""
        points: list[tuple[float, float]] = []
        level = base
        for time, live in dict(steps).items():  # of several changes at one time, the last
            if base - live * height != level:
                x = self.left + time * self.scale
                points += (x, level), (x, base - live * height)
                level = base - live * height
        return tuple(points)


# ---- terminal -------------------------------------------------------------------------------------------------------
# A schedule in the terminal: one line per rank in colour, and under them what each rank holds.
#
# A column is a slice of time, and shows the action that fills most of it. Without colours, the letters of the kinds
# stand in for them. The microbatch is shown where its number fits, so a wider terminal shows more of them.


BARS = " ▁▂▃▄▅▆▇█"
LEFT_OUT = "┊⋯┊"


def timeline(simulation: Simulation, columns: int = 100, colour: bool = True, left_out: int = 0) -> Text:
    """The picture as styled text, at most `columns` wide.

    `left_out` is the number of microbatches from the middle of the step that were not simulated: a gap shows where
    they would be, and the numbers after it are higher by so many.
    """
    label = len(f"rank {simulation.schedule.p - 1} ")
    width = max(10, columns - label - 6 - (len(LEFT_OUT) if left_out else 0))
    slice_ = simulation.makespan / width if simulation.makespan else 1.0
    # Whole columns per action look best: take the largest such width when the schedule is short enough.
    shown = [[*simulation.shown(rank)] for rank in range(simulation.schedule.p)]
    shortest = min((span.end - span.start for spans in shown for span in spans if span.end > span.start), default=1.0)
    per_action = int(shortest / slice_)
    if per_action >= 1:
        slice_ = shortest / per_action
        width = round(simulation.makespan / slice_)

    text = Text()
    for rank in range(simulation.schedule.p):
        text.append(f"rank {rank} ".rjust(label), "dim")
        cells = _columns(shown[rank], width, slice_)
        middle = width // 2 if left_out else width
        for offset, part in ((0, cells[:middle]), (left_out, cells[middle:])):
            text.append(LEFT_OUT if offset else "", "dim")
            for span, group in groupby(part):
                cell = _pair if span and span.beside else _cell
                text.append_text(cell(simulation.schedule, _renumbered(span, offset), len([*group]), colour))
        text.append("\n")
    text.append("memory\n".rjust(label), "dim")
    highest = max(simulation.peak_activations) or 1.0
    for rank, peak in enumerate(simulation.peak_activations):
        text.append(f"rank {rank} ".rjust(label), "dim")
        bars = _bars(simulation.memory[rank], width, slice_, highest)
        text.append(f"{bars[:middle]}{LEFT_OUT if left_out else ''}{bars[middle:]}", Style(color="#5b7fae"))
        text.append(f" {peak:.3g}\n")
    return text


def _renumbered(span: Shown | None, offset: int) -> Shown | None:
    """The span with `offset` added to the number of its microbatch."""
    if span is None or not offset:
        return span

    def moved(action: Action) -> Action:
        return action._replace(microbatch=action.microbatch + offset) if action.microbatch != ALL else action

    return span._replace(action=moved(span.action), beside=span.beside and moved(span.beside))


def _columns(spans: list[Shown], width: int, slice_: float) -> list[Shown | None]:
    """For each column the action that fills most of its slice of time; None where most of it is idle."""
    largest: list[tuple[float, Shown | None]] = [(0.0, None)] * width
    idle = [slice_] * width
    for span in spans:
        for column in range(int(span.start / slice_), min(width, math.ceil(span.end / slice_))):
            time = min(span.end, (column + 1) * slice_) - max(span.start, column * slice_)
            idle[column] -= time
            if time > largest[column][0] + 1e-9 * slice_:
                largest[column] = time, span
    return [span if time >= rest - 1e-9 * slice_ else None for (time, span), rest in zip(largest, idle, strict=True)]


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
    return str(action.microbatch) if action.microbatch != ALL else ""


def _colour(schedule: Schedule, action: Action) -> RGB:
    """The colour of a cell. No line parts neighbours of the same kind, so every other microbatch is a bit darker."""
    background = colour_of(schedule, action)
    return mix(background, (0, 0, 0), 0.16) if action.microbatch % 2 else background


def _style(background: RGB) -> Style:
    return Style(color=text_on(background), bgcolor=hexed(background))


def _bars(steps: list[tuple[float, float]], width: int, slice_: float, highest: float) -> str:
    """Live activations as bars; `steps` are (time, activations from then on), a full bar is `highest`."""
    times = [time for time, _ in steps]
    bars = []
    for column in range(width):
        place = bisect_right(times, (column + 0.5) * slice_) - 1
        level = steps[place][1] / highest if place >= 0 else 0.0
        bars.append(BARS[round(level * (len(BARS) - 1))])
    return "".join(bars)


def legend(simulations: Sequence[Simulation], colour: bool = True) -> Text:
    """Which colour is which kind of action."""
    present = {span.action.kind for s in simulations for spans in s.timeline for span in spans}
    text = Text()
    if any(span.beside for s in simulations for rank in range(s.schedule.p) for span in s.shown(rank)):
        text.append(" ▀ " if colour else " & ")
        text.append(" an F beside a B   ", "dim")
    for kind in HUES:
        if kind in present:
            background = shade(kind, 0, 1)
            style = Style(color=text_on(background), bgcolor=hexed(background)) if colour else Style()
            text.append(f" {kind} ", style)
            text.append(f" {NAMES[kind]}   ", "dim")
    return text
