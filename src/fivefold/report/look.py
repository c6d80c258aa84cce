"""The look of all pictures, in one place: colours, type, and what a dark picture has instead.

Data is drawn in the colours of Okabe and Ito ("Color Universal Design", 2008), which people who do not see red, green
or blue can tell apart; `tests/report/test_look.py` measures that. They stand on light and on dark paper alike. What is
no data (ink, lines, paper) is named by its light colour, and `DARK` says which one a dark picture has in its place.
"""

from pathlib import Path

INK, GREY, PALE, FAINT, PAPER = "#1f2733", "#667080", "#d9dee5", "#eef1f5", "#ffffff"
IDLE, STRIPE = "#f6f7f9", "#d3d9e2"  # time in which nothing happens: the ground and its lines
HELD, HELD_EDGE = "#c9d8ec", "#5b7fae"  # what a rank holds
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
REST = "#bcc4cd"  # what has no name of its own
ON_LIGHT, ON_DARK = "#10161e", "#fffffe"  # text on a colour; neither is ink nor paper, so a dark picture keeps both

FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
WIDTH, MARGIN = 1280.0, 56.0  # of a chart, which is as wide as a slide
TITLE, SUBTITLE, LABEL, SMALL = 26.0, 16.0, 15.0, 13.0  # sizes of type
RGB = tuple[int, int, int]


def is_dark(path: Path) -> bool:
    """`memory.dark.svg` is a dark picture, `memory.svg` a light one."""
    return path.stem.lower().endswith(".dark")


def shown(colour: str, dark: bool) -> str:
    """A colour as the picture has it."""
    return DARK.get(colour, colour) if dark else colour


def rgb(colour: str) -> RGB:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def hexed(colour: RGB) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def mix(one: RGB, other: RGB, share: float) -> RGB:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def light(colour: RGB) -> float:
    """Relative luminance, as the web's rules of contrast define it."""
    parts = (part / 255 for part in colour)
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def text_on(colour: RGB) -> str:
    """Of white and black the one that is easier to read there."""
    return ON_DARK if 1.05 / (light(colour) + 0.05) >= (light(colour) + 0.05) / 0.056 else ON_LIGHT
