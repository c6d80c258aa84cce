"""Writes scenes as files: SVG, or PNG by Pillow, whose wheels contain a font, so that a bare server can draw text."""

import io
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.render import svg
from fivefold.render.scene import (
    FONT,
    IDLE,
    PAPER,
    STRIPE,
    Area,
    Curve,
    Frame,
    Hatch,
    Line,
    Mark,
    Points,
    Rect,
    Scene,
    Shape,
    TextMark,
    is_dark,
    outline,
    shown,
)
from fivefold.support.errors import UserError
from fivefold.support.files import write

PICTURE_SUFFIXES = (".svg", ".png")
PIXELS_PER_UNIT, MAX_PIXELS = 2.0, 4000  # per unit of the scene; the maximum each way may lower it
ANTIALIASING = 2  # so many times as many pixels are painted each way, then averaged
DASH_LENGTH, DASH_GAP = 7.0, 5.0  # of a dashed line


def save(scene: Scene, path: Path) -> None:
    """Write a picture. The suffix decides the format; `.dark` before it makes the picture dark."""
    suffix, dark = path.suffix.lower(), is_dark(path)
    if suffix not in PICTURE_SUFFIXES:
        raise UserError(
            f"a picture is an .svg or a .png file, and {path} ends in {path.suffix or 'nothing'!r}", "output.kind"
        )
    write(path, to_png(scene, dark=dark) if suffix == ".png" else to_svg(scene, dark=dark))


def to_svg(scene: Scene, *, dark: bool = False) -> str:
    shapes = [_shape(shape, dark) for shape in scene.shapes]
    if any(isinstance(shape, Hatch) for shape in scene.shapes):
        shapes.insert(0, _pattern(dark))
    return svg.document(
        scene.width, scene.height, shapes, title=scene.title, background=shown(PAPER, dark), font=FONT
    )  # fmt: skip


def _pattern(dark: bool) -> str:
    """The pattern of a Hatch. Light and dark ones have different ids, for pages that show both."""
    stripes = svg.rect(None, None, 5, 5, fill=shown(IDLE, dark))
    stripes += svg.path([(0, 0), (0, 5)], stroke=shown(STRIPE, dark), stroke_width=1.6)
    turned: dict[str, svg.Attribute] = {
        "id": _idle(dark),
        "width": 5,
        "height": 5,
        "patternUnits": "userSpaceOnUse",
        "patternTransform": "rotate(45)",
    }
    return svg.element("defs", {}, svg.element("pattern", turned, stripes))


def _idle(dark: bool) -> str:
    return "idle-dark" if dark else "idle"


def _shape(shape: Shape, dark: bool) -> str:
    match shape:
        case Rect(x, y, width, height, fill, hint):
            return svg.rect(x, y, width, height, hint, fill=shown(fill, dark))
        case Frame(x, y, width, height, stroke, thick):
            return svg.rect(x, y, width, height, fill="none", stroke=shown(stroke, dark), stroke_width=thick, rx=3)
        case Hatch(x, y, width, height):
            return svg.rect(x, y, width, height, fill=f"url(#{_idle(dark)})")
        case Line(x1, y1, x2, y2, stroke, width, dashed):
            dashes = f"{DASH_LENGTH:g} {DASH_GAP:g}" if dashed else None
            return svg.line(x1, y1, x2, y2, stroke=shown(stroke, dark), stroke_width=width, stroke_dasharray=dashes)
        case Curve(points, stroke, width):
            colour = shown(stroke, dark)
            return svg.path(points, fill="none", stroke=colour, stroke_width=width, stroke_linejoin="round")
        case Area(points, fill, stroke):
            edge: dict[str, svg.Attribute] = {"stroke_width": 1.2, "stroke_linejoin": "round"}
            upper = svg.path(points[1:-1], fill="none", stroke=shown(stroke, dark), **edge)
            return svg.path(points, "Z", fill=shown(fill, dark)) + upper
        case Mark(x, y, radius, fill, kind, opacity):
            look: dict[str, svg.Attribute] = {"fill": shown(fill, dark)}
            look["fill_opacity"] = opacity if opacity < 1 else None
            return svg.path(outline(shape), "Z", **look) if kind else svg.circle(x, y, radius, **look)
        case TextMark():
            return _text(shape, dark)


def _text(shape: TextMark, dark: bool) -> str:
    # Digits are 0.72 of the size high, so the baseline is half of that below the middle.
    below = 0.36 * shape.size
    x, y = (shape.x + below, shape.y) if shape.turned else (shape.x, shape.y + below)
    return svg.text(
        x,
        y,
        shape.text,
        font_size=shape.size,
        fill=shown(shape.fill, dark),
        font_weight="600" if shape.bold else None,
        text_anchor=shape.anchor if shape.anchor != "start" else None,
        transform=f"rotate(-90 {svg.number(x)} {svg.number(y)})" if shape.turned else None,
    )


# ---- PNG -------------------------------------------------------------------------------------------------------------


def to_png(scene: Scene, *, dark: bool = False) -> bytes:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise UserError(
            'PNG pictures need Pillow: pip install "fivefold[draw]"; or write an .svg instead', "install.pillow"
        ) from None
    scale = min(PIXELS_PER_UNIT, MAX_PIXELS / max(scene.width, scene.height))
    size = round(scene.width * scale), round(scene.height * scale)
    image = Image.new("RGB", (ANTIALIASING * size[0], ANTIALIASING * size[1]), shown(PAPER, dark))
    painter = _Painter(image, ImageDraw.Draw(image, "RGBA"), ANTIALIASING * scale, cache(ImageFont.load_default), dark)
    for shape in scene.shapes:
        painter.paint(shape)
    buffer = io.BytesIO()
    image.reduce(ANTIALIASING).save(buffer, "PNG")
    return buffer.getvalue()


class _Painter:
    def __init__(self, image: Any, draw: Any, scale: float, font: Callable[[float], Any], dark: bool) -> None:
        self.image, self.draw, self.scale, self.font, self.dark = image, draw, scale, font, dark

    def paint(self, shape: Shape) -> None:
        match shape:
            case Rect(x, y, width, height, fill):
                self.rect(x, y, width, height, self.colour(fill))
            case Frame(x, y, width, height, stroke, thick):
                corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y))
                self.lines(corners, stroke, thick)
            case Hatch(x, y, width, height):
                self.hatch(x, y, width, height)
            case Line(x1, y1, x2, y2, stroke, width, dashed):
                for piece in _dashes(x1, y1, x2, y2) if dashed else [((x1, y1), (x2, y2))]:
                    self.lines(piece, stroke, width)
            case Curve(points, stroke, width):
                self.lines(points, stroke, width)
            case Area(points, fill, stroke):
                self.draw.polygon([self.pixels(*point) for point in points], fill=self.colour(fill))
                self.lines(points[1:-1], stroke, 1.2)
            case Mark():
                self.mark(shape)
            case TextMark():
                self.text(shape)

    def colour(self, name: str) -> str:
        return shown(name, self.dark)

    def pixels(self, *values: float) -> tuple[int, ...]:
        return tuple(round(value * self.scale) for value in values)

    def lines(self, points: Points, stroke: str, width: float) -> None:
        thick = max(1, round(width * self.scale))
        self.draw.line([self.pixels(*point) for point in points], self.colour(stroke), thick, joint="curve")

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> tuple[int, ...]:
        """Paint a rectangle; returns its left, top, right and bottom in pixels."""
        left, top, right, bottom = self.pixels(x, y, x + width, y + height)
        if right > left and bottom > top:
            self.draw.rectangle((left, top, right - 1, bottom - 1), fill=fill)
        return left, top, right, bottom

    def hatch(self, x: float, y: float, width: float, height: float) -> None:
        left, top, right, bottom = self.rect(x, y, width, height, self.colour(IDLE))
        # Lines x + y = constant, on a grid that runs through the whole picture, cut to the rectangle.
        step = round(7 * self.scale)
        for total in range((left + top) // step * step, right + bottom, step):
            x1, x2 = max(left, total - bottom + 1), min(right - 1, total - top)
            if x1 < x2:
                self.draw.line((x1, total - x1, x2, total - x2), fill=self.colour(STRIPE), width=round(self.scale))

    def mark(self, shape: Mark) -> None:
        fill = f"{self.colour(shape.fill)}{round(255 * shape.opacity):02x}"
        if shape.shape:
            self.draw.polygon([self.pixels(*point) for point in outline(shape)], fill=fill)
        else:
            x, y, r = shape.x, shape.y, shape.radius
            self.draw.ellipse(self.pixels(x - r, y - r, x + r, y + r), fill=fill)

    def text(self, shape: TextMark) -> None:
        font, fill = self.font(shape.size * self.scale), self.colour(shape.fill)
        if shape.turned:
            self.turned(shape, font, fill)
            return
        anchor = {"start": "lm", "middle": "mm", "end": "rm"}[shape.anchor]
        x, y = shape.x * self.scale, shape.y * self.scale
        # The font has one weight. Bold text is painted several times side by side; a stroke around the letters would
        # close the gap of an i.
        for offset in (0.0, 0.018, 0.036, 0.054) if shape.bold else (0.0,):
            self.draw.text((x + offset * shape.size * self.scale, y), shape.text, fill=fill, font=font, anchor=anchor)

    def turned(self, shape: TextMark, font: Any, fill: str) -> None:
        """Paint text that reads upwards, with its middle at (x, y)."""
        from PIL import Image, ImageDraw

        width, height = math.ceil(font.getlength(shape.text)) + 4, math.ceil(1.6 * shape.size * self.scale)
        ink = Image.new("L", (width, height))
        ImageDraw.Draw(ink).text((width / 2, height / 2), shape.text, fill=255, font=font, anchor="mm")
        ink = ink.rotate(90, expand=True)
        x, y = self.pixels(shape.x, shape.y)
        self.image.paste(fill, (x - ink.width // 2, y - ink.height // 2), ink)


def _dashes(x1: float, y1: float, x2: float, y2: float) -> list[Points]:
    """The dashes of a dashed line, each with its two ends."""
    length = math.hypot(x2 - x1, y2 - y1)

    def point(distance: float) -> tuple[float, float]:
        share = min(1.0, distance / length)
        return x1 + share * (x2 - x1), y1 + share * (y2 - y1)

    count = math.ceil(length / (DASH_LENGTH + DASH_GAP))
    return [
        (point(n * (DASH_LENGTH + DASH_GAP)), point(n * (DASH_LENGTH + DASH_GAP) + DASH_LENGTH)) for n in range(count)
    ]
