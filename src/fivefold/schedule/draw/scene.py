"""A picture as data: rectangles, lines, areas, text. `paint` turns the same scene into SVG and PNG."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Anchor = Literal["start", "middle", "end"]
INK, GREY, PALE, PAPER = "#1f2733", "#667080", "#d9dee5", "#ffffff"


class Rect(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    fill: str
    hint: str = ""  # shown when the mouse rests on it


class Hatch(NamedTuple):
    """A rectangle of thin diagonal lines: time in which nothing happens."""

    x: float
    y: float
    width: float
    height: float


class Line(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str = PALE
    width: float = 1.0


class Area(NamedTuple):
    """A filled polygon with an outline along its upper side."""

    points: tuple[tuple[float, float], ...]
    fill: str
    stroke: str


class Text(NamedTuple):
    """`y` is the middle of the line of text."""

    x: float
    y: float
    text: str
    size: float
    anchor: Anchor = "start"
    fill: str = INK
    bold: bool = False


Shape = Rect | Hatch | Line | Area | Text


@dataclass
class Scene:
    """What to paint, back to front."""

    width: float
    height: float
    title: str
    shapes: list[Shape] = field(default_factory=list)


def text_width(text: str, size: float) -> float:
    """A fair guess at the width of sans-serif text."""
    return size * sum(0.3 if c in "iljtfr.,:;|()· " else 0.85 if c in "mwMW" else 0.56 for c in text)
