"""A picture as data: rectangles, lines, areas, marks, text. `paint` turns the same scene into SVG and PNG."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fivefold.report.look import INK, PALE

Anchor = Literal["start", "middle", "end"]
Points = tuple[tuple[float, float], ...]


class Rect(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    fill: str
    hint: str = ""  # shown when the mouse rests on it


class Frame(NamedTuple):
    """The outline of a rectangle."""

    x: float
    y: float
    width: float
    height: float
    stroke: str = INK
    thick: float = 1.5


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
    dashed: bool = False


class Curve(NamedTuple):
    """Straight lines from point to point."""

    points: Points
    stroke: str
    width: float = 2.0


class Area(NamedTuple):
    """A filled polygon with an outline along its upper side."""

    points: Points
    fill: str
    stroke: str


class Mark(NamedTuple):
    """A point of a scatter plot: its shape is a number, so that more sources than colours can be told apart."""

    x: float
    y: float
    radius: float
    fill: str
    shape: int = 0
    opacity: float = 1.0


class Text(NamedTuple):
    """`y` is the middle of the line of text; `turned` reads upwards."""

    x: float
    y: float
    text: str
    size: float
    anchor: Anchor = "start"
    fill: str = INK
    bold: bool = False
    turned: bool = False


Shape = Rect | Frame | Hatch | Line | Curve | Area | Mark | Text
SHAPES = 4  # of marks


@dataclass
class Scene:
    """What to paint, back to front."""

    width: float
    height: float
    title: str
    shapes: list[Shape] = field(default_factory=list)


def outline(mark: Mark) -> Points:
    """The corners of a mark that is no circle: a square, a triangle, a diamond."""
    x, y, r = mark.x, mark.y, mark.radius
    corners = {
        1: ((-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)),
        2: ((0.0, -1.15), (1.05, 0.8), (-1.05, 0.8)),
        3: ((0.0, -1.3), (1.15, 0.0), (0.0, 1.3), (-1.15, 0.0)),
    }[mark.shape]
    return tuple((x + r * across, y + r * down) for across, down in corners)


def text_width(text: str, size: float) -> float:
    """A fair guess at the width of sans-serif text."""
    return size * sum(0.3 if c in "iljtfr.,:;|()· " else 0.85 if c in "mwMW" else 0.56 for c in text)


def cut(text: str, size: float, room: float) -> str:
    """As much of a text as there is room for."""
    if text_width(text, size) <= room:
        return text
    while len(text) > 1 and text_width(f"{text}…", size) > room:
        text = text[:-1]
    return f"{text.rstrip()}…"
