"""Draws simulations: the timeline of each rank, and underneath what it holds in memory (`terminal.py`: as text).

Several simulations share one time scale, so that a longer schedule looks longer. They stand below each other as long
as the picture stays wider than it is high, and otherwise in columns: it is for a slide.
"""

from collections.abc import Sequence

from fivefold.render.chart import round_step
from fivefold.render.scene import (
    GREY,
    HELD,
    HELD_EDGE,
    INK,
    Area,
    Hatch,
    Line,
    Rect,
    Scene,
    TextMark,
    cut,
    hexed,
    text_on,
    text_width,
)
from fivefold.schedules.actions import ALL_MICROBATCHES, STEP, Kind
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.palette import KIND_COLOURS, KIND_NAMES, colour_of, shade
from fivefold.schedules.simulate import Simulation
from fivefold.support.text import figure

LEFT, RIGHT, TOP, BOTTOM = 62.0, 58.0, 22.0, 14.0  # margins
HEAD, AXIS, CAPTION, GAP = 50.0, 30.0, 18.0, 28.0  # heights: title, time axis, memory's caption, between schedules
NARROWEST, WIDEST, CELL = 940.0, 2600.0, 13.0  # widths of the time axis, and of a short action where there is room
COMFORTABLE = 1400.0  # a wider picture will be shown smaller, so its type grows with it
LANDSCAPE = 1.25  # how much wider than high a comparison is
MIN_TYPE_SIZE = 8.0  # the smallest type that is printed, where the picture is shown COMFORTABLE wide
CHUNKS_ARE_SHADES = "shades are chunks:"
MAX_NUMBERED_ACTIONS = 20_000  # actions: more are drawn without numbers and hints, which would be most of the file
BOLD_WIDTH = 1.12  # how much wider bold type is


def picture(simulations: Sequence[Simulation], many: int = MAX_NUMBERED_ACTIONS, clock: str = "time") -> Scene:
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
        return max(MIN_TYPE_SIZE * self.unit, min(largest, (cell - 3.0) / (0.56 * len(str(self.schedule.m - 1)))))

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
        name = cut(schedule.name, 17 * u, (room - text_width(numbers, 12 * u) - 28 * u) / BOLD_WIDTH)
        beside = self.left + BOLD_WIDTH * text_width(name, 17 * u) + 14 * u
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
        legend += [(f"{kind} {KIND_NAMES[kind]}", kind) for kind in reversed(KIND_COLOURS) if kind in present]
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
        for action, start, end, beside in self.simulation.drawn(rank):
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
        if self.labelled and action.microbatch != ALL_MICROBATCHES:
            number = TextMark(x + (width - seam) / 2, y + height / 2, str(action.microbatch), self.font, "middle")
            self.paint_number(scene, number._replace(fill=text_on(colour)), width, height)

    def paint_number(self, scene: Scene, number: TextMark, width: float, height: float) -> None:
        """Paint the microbatch if the longest number fits, so that all actions of one width show theirs, or none."""
        longest = str(self.schedule.m - 1)
        size = min(number.size, 0.82 * height, (width - 1.5) / text_width(longest, 1.0))
        if size >= MIN_TYPE_SIZE * self.unit * (1 - 1e-9):
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
