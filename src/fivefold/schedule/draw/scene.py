"""A picture as data: rectangles, lines, areas, text; and its colours. `paint` turns the same scene into SVG and PNG."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fivefold.schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, STEP, WEIGHT_GRAD, Kind

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


# ---- colours: one hue per kind of action, one shade per chunk --------------------------------------------------------

HUES: dict[Kind, tuple[int, int, int]] = {
    FORWARD: (46, 103, 178),  # blue
    BACKWARD: (24, 128, 112),  # sea green
    INPUT_GRAD: (214, 118, 22),  # orange
    WEIGHT_GRAD: (130, 84, 168),  # violet
    STEP: (70, 76, 86),
}
NAMES: dict[Kind, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRAD: "input gradient",
    WEIGHT_GRAD: "weight gradient",
    STEP: "optimizer",
}
LIGHTEST = 0.68  # how far the last chunk's shade goes towards white


def shade(kind: Kind, chunk: int, chunks: int) -> tuple[int, int, int]:
    """The colour of an action: full for chunk 0, lighter chunk by chunk."""
    lighter = LIGHTEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    return mix(HUES[kind], (255, 255, 255), lighter)


def mix(one: tuple[int, int, int], other: tuple[int, int, int], share: float) -> tuple[int, int, int]:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def text_on(colour: tuple[int, int, int]) -> str:
    """White on dark colours, ink on light ones."""
    red, green, blue = colour
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else "#1f2733"


def hexed(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
