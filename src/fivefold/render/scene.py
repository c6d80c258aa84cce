"""A picture as data: rectangles, lines, areas, marks, text. `paint` turns the same scene into SVG and PNG."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

# ---- look -----------------------------------------------------------------------------------------------------------
# The look of all pictures, in one place: colours, type, and what a dark picture has instead.
#
# Data is drawn in the colours of Okabe and Ito ("Color Universal Design", 2008), which colour-blind people can tell
# apart; `tests/render/test_look.py` measures that. They suit light and dark pictures alike. All
# other colours (ink, lines, paper) are those of a light picture, and `DARK` has their dark counterparts.


INK, GREY, PALE, FAINT, PAPER = "#1f2733", "#667080", "#d9dee5", "#eef1f5", "#ffffff"
IDLE, STRIPE = "#f6f7f9", "#d3d9e2"  # idle time: the background and its diagonal lines
HELD, HELD_EDGE = "#c9d8ec", "#5b7fae"  # the memory that a rank holds
DARK = {
    INK: "#eceff4",
    GREY: "#a6b0bd",
    PALE: "#39424e",
    FAINT: "#222932",
    PAPER: "#14181f",
    IDLE: "#1b2129",
    STRIPE: "#333c48",
    HELD: "#2c4464",
    HELD_EDGE: "#86aede",
}

BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
REST = "#bcc4cd"  # all other data
ON_LIGHT, ON_DARK = "#10161e", "#fffffe"  # text on a colour; not in `DARK`, so that a dark picture keeps both

FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
WIDTH, MARGIN = 1280.0, 56.0  # of a chart, which is as wide as a slide
TITLE, SUBTITLE, LABEL, SMALL = 26.0, 16.0, 15.0, 13.0  # sizes of type
RGB = tuple[int, int, int]


def is_dark(path: Path) -> bool:
    """`memory.dark.svg` is a dark picture, `memory.svg` a light one."""
    return path.stem.lower().endswith(".dark")


def shown(colour: str, dark: bool) -> str:
    """The colour that a light or a dark picture has for `colour`."""
    return DARK.get(colour, colour) if dark else colour


def rgb(colour: str) -> RGB:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def hexed(colour: RGB) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def mix(first: RGB, second: RGB, share: float) -> RGB:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


def light(colour: RGB) -> float:
    """Relative luminance, as the web's rules of contrast define it."""
    parts = (part / 255 for part in colour)
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def text_on(colour: RGB) -> str:
    """White or black, whichever has the better contrast on a colour."""
    return ON_DARK if 1.05 / (light(colour) + 0.05) >= (light(colour) + 0.05) / 0.056 else ON_LIGHT


# ---- scene ----------------------------------------------------------------------------------------------------------


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
    """A rectangle of thin diagonal lines: idle time."""

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
    """A point of a scatter plot. `shape` is 0 for a circle or one of `outline`: colours alone do not suffice."""

    x: float
    y: float
    radius: float
    fill: str
    shape: int = 0
    opacity: float = 1.0


class TextMark(NamedTuple):
    """Text; `y` is the middle of its line. `turned` text reads upwards."""

    x: float
    y: float
    text: str
    size: float
    anchor: Anchor = "start"
    fill: str = INK
    bold: bool = False
    turned: bool = False


Shape = Rect | Frame | Hatch | Line | Curve | Area | Mark | TextMark
SHAPES = 4  # how many shapes a mark can have


@dataclass
class Scene:
    """A picture: its shapes are painted in order, so that later ones cover earlier ones."""

    width: float
    height: float
    title: str
    shapes: list[Shape] = field(default_factory=list)


def outline(mark: Mark) -> Points:
    """The corners of a mark with a shape from 1: a square, a triangle, a diamond."""
    x, y, r = mark.x, mark.y, mark.radius
    corners = {
        1: ((-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)),
        2: ((0.0, -1.15), (1.05, 0.8), (-1.05, 0.8)),
        3: ((0.0, -1.3), (1.15, 0.0), (0.0, 1.3), (-1.15, 0.0)),
    }[mark.shape]
    return tuple((x + r * across, y + r * down) for across, down in corners)


def text_width(text: str, size: float) -> float:
    """An estimate of the width of sans-serif text."""
    return size * sum(0.3 if c in "iljtfr.,:;|()· " else 0.85 if c in "mwMW" else 0.56 for c in text)


def cut(text: str, size: float, width: float) -> str:
    """The text, cut to a width if it is longer."""
    if text_width(text, size) <= width:
        return text
    while len(text) > 1 and text_width(f"{text}…", size) > width:
        text = text[:-1]
    return f"{text.rstrip()}…"
