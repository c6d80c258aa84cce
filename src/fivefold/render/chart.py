"""What charts have in common: a title, axes with round numbers and their unit, a legend.

scene = sheet("Memory of a GPU", "llama3-70b as dp=8,tp=8", height=400)
plot = Plot(scene, left=120, top=110, width=1000, height=220, low=(0, 0), high=(5, 80))
plot.axis_x("GB"); plot.axis_y("rank"); legend(scene, 380, [("parameters", BLUE)])
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fivefold.render.scene import (
    GREY,
    INK,
    LABEL,
    MARGIN,
    PALE,
    PAPER,
    SMALL,
    SUBTITLE,
    TITLE,
    WIDTH,
    Anchor,
    Line,
    Mark,
    Rect,
    Scene,
    TextMark,
    cut,
    text_width,
)
from fivefold.support.text import figure

TOP = 104.0  # below title and subtitle
ROW = 26.0  # of a legend
GAP = 26.0  # between its entries
BAR_SEAM, MIN_BAR_PART = 1.0, 2.0  # the gap between the parts of a bar, and the shortest part that can be seen


def sheet(title: str, subtitle: str, height: float, name: str = "") -> Scene:
    """A scene as wide as a slide, with its title and subtitle; `name` is for screen readers."""
    scene = Scene(WIDTH, height, name or title)
    room = WIDTH - 2 * MARGIN
    scene.shapes += [
        TextMark(MARGIN, 44, cut(title, 1.12 * TITLE, room), TITLE, bold=True),
        TextMark(MARGIN, 74, cut(subtitle, SUBTITLE, room), SUBTITLE, fill=GREY),
    ]
    return scene


@dataclass
class Plot:
    """The rectangle that data is drawn in, and its scales; `log`: both are logarithmic."""

    scene: Scene
    left: float
    top: float
    width: float
    height: float
    low: tuple[float, float]
    high: tuple[float, float]
    log: bool = False

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.left + self.width * self._share(value, 0)

    def y(self, value: float) -> float:
        return self.bottom - self.height * self._share(value, 1)

    def _share(self, value: float, axis: int) -> float:
        """Where a value is on an axis (0: x, 1: y), from 0 at its low end to 1."""
        low, high = self.low[axis], self.high[axis]
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / ((high - low) or 1.0)

    def axis_x(self, label: str, text_of: Callable[[float], str] = figure, parts: float = 8) -> None:
        for value in self._ticks(0, parts):
            x = self.x(value)
            self.scene.shapes += [
                Line(x, self.top, x, self.bottom),
                TextMark(x, self.bottom + 18, text_of(value), SMALL, "middle", GREY),
            ]
        self.scene.shapes += [
            Line(self.left, self.bottom, self.left + self.width, self.bottom, GREY),
            TextMark(self.left + self.width / 2, self.bottom + 42, label, LABEL, "middle"),
        ]

    def axis_y(self, label: str, text_of: Callable[[float], str] = figure, parts: float = 6) -> None:
        for value in self._ticks(1, parts):
            y = self.y(value)
            self.scene.shapes += [
                Line(self.left, y, self.left + self.width, y),
                TextMark(self.left - 10, y, text_of(value), SMALL, "end", GREY),
            ]
        self.scene.shapes.append(
            TextMark(MARGIN / 2 + 4, self.top + self.height / 2, label, LABEL, "middle", turned=True)
        )

    def limit(self, value: float, label: str, colour: str) -> None:
        """A dashed horizontal line, with its label above the right end."""
        y, end = self.y(value), self.left + self.width
        self.scene.shapes += [
            Line(self.left, y, end, y, colour, 2.0, dashed=True),
            TextMark(end, y - 12, label, SMALL, "end", INK),
        ]

    def limit_x(self, value: float, label: str, anchor: Anchor = "start") -> None:
        """A dashed vertical line, with its label above it."""
        x = self.x(value)
        self.scene.shapes += [
            Line(x, self.top - 12, x, self.bottom, INK, 2.0, dashed=True),
            TextMark(x + (4 if anchor == "start" else -4), self.top - 18, label, SMALL, anchor),
        ]

    def _ticks(self, axis: int, parts: float) -> list[float]:
        """Round values on an axis: powers of ten if it is logarithmic, else steps that cut it into about `parts`."""
        low, high = self.low[axis], self.high[axis]
        if self.log:
            return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
        step = round_step(high - low, parts)
        first = math.ceil(low / step - 1e-9) if step else 0
        return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)] if step else [low]


Entry = tuple[str, str] | tuple[str, str, int]  # name, colour, and the shape of its mark; without one a square


def legend(scene: Scene, y: float, entries: Iterable[Entry], left: float = MARGIN, right: float = 0.0) -> float:
    """Draw entries in lines between left and right; returns the y below them."""
    x, end = left, right or scene.width - MARGIN
    for name, colour, *shape in entries:
        entry_width = 22 + text_width(name, LABEL)
        if x > left and x + entry_width > end:
            x, y = left, y + ROW
        scene.shapes += [
            Mark(x + 7, y, 6, colour, shape[0]) if shape else Rect(x, y - 7, 14, 14, colour),
            TextMark(x + 22, y, name, LABEL),
        ]
        x += entry_width + GAP
    return y + ROW


@dataclass(frozen=True)
class Bar:
    """A stacked bar."""

    name: str  # left of it
    parts: Sequence[tuple[str, str, float]]  # name, colour, size
    label: str = ""  # at its end
    bold: bool = False

    @property
    def total(self) -> float:
        return sum(size for _, _, size in self.parts)


def stacked(plot: Plot, bars: Sequence[Bar], unit: str) -> None:
    """Draw horizontal bars, one below the other; a bar that is longer than the axis is cut and notched at its end."""
    row, end = plot.height / len(bars), plot.left + plot.width
    high = min(34.0, 0.68 * row)
    for number, bar in enumerate(bars):
        x, middle = plot.left, plot.top + row * (number + 0.5)
        size = min(LABEL, 0.62 * row)
        plot.scene.shapes.append(TextMark(plot.left - 14, middle, bar.name, size, "end", bold=bar.bold))
        for name, colour, length in bar.parts:
            stop = min(end, x + plot.width * length / plot.high[0])
            if stop > x:
                hint = f"{name}: {length:.3g} {unit}"
                part_width = max(MIN_BAR_PART, stop - x - BAR_SEAM)
                plot.scene.shapes.append(Rect(x, middle - high / 2, part_width, high, colour, hint))
            x = stop
        if bar.total > plot.high[0]:
            plot.scene.shapes += [
                Line(end - 12 - 5 * k, middle + high / 2 + 3, end - 6 - 5 * k, middle - high / 2 - 3, PALE, 3)
                for k in (0, 1)
            ]
        if bar.label:  # on a background of its own, so that lines do not cross it
            label_width = (1.12 if bar.bold else 1.0) * text_width(bar.label, size)
            plot.scene.shapes += [
                Rect(x + 4, middle - 0.7 * size, label_width + 12, 1.4 * size, PAPER),
                TextMark(x + 10, middle, bar.label, size, bold=bar.bold),
            ]


def amount(value: float) -> str:
    """A number with three digits and no exponent: 1,108, 42.7, 0.35."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def round_step(length: float, parts: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that cuts the length into about so many parts."""
    if length <= 0:
        return 0.0
    raw = length / max(parts, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
