"""Scenes as files: SVG, and PNG painted with Pillow, whose wheels carry a font, so that a bare server has text too."""

import io
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.report import svg
from fivefold.schedule.draw.picture import picture
from fivefold.schedule.draw.scene import PAPER, Area, Hatch, Line, Rect, Scene, Shape, Text
from fivefold.schedule.simulate import Simulation
from fivefold.support.errors import UserError
from fivefold.support.files import write

PICTURES = (".svg", ".png")
SHARP, LARGEST = 2.0, 4000  # pixels per unit of the scene, as long as the picture stays below so many pixels
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_STRIPES = svg.rect(None, None, 5, 5, fill="#f6f7f9") + svg.path([(0, 0), (0, 5)], stroke="#d3d9e2", stroke_width=1.6)
_TURNED: dict[str, svg.Attribute] = {
    "id": "idle",
    "width": 5,
    "height": 5,
    "patternUnits": "userSpaceOnUse",
    "patternTransform": "rotate(45)",
}
_HATCH = svg.element("defs", {}, svg.element("pattern", _TURNED, _STRIPES))


def save_picture(simulations: Sequence[Simulation], path: Path) -> None:
    """Draw one or several simulations into one file; the suffix decides about the format."""
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise UserError(f"a picture is an .svg or a .png file, and {path} ends in {path.suffix or 'nothing'!r}")
    scene = picture(simulations)
    write(path, to_png(scene) if suffix == ".png" else to_svg(scene))


def to_svg(scene: Scene) -> str:
    shapes = [_HATCH, *map(_shape, scene.shapes)]
    return svg.document(scene.width, scene.height, shapes, title=scene.title, background=PAPER, font=FONT)


def _shape(shape: Shape) -> str:
    match shape:
        case Rect(x, y, width, height, fill, hint):
            return svg.rect(x, y, width, height, hint, fill=fill)
        case Hatch(x, y, width, height):
            return svg.rect(x, y, width, height, fill="url(#idle)")
        case Line(x1, y1, x2, y2, stroke, width):
            return svg.line(x1, y1, x2, y2, stroke=stroke, stroke_width=width)
        case Area(points, fill, stroke):
            upper = svg.path(points[1:-1], fill="none", stroke=stroke, stroke_width=1.2, stroke_linejoin="round")
            return svg.path(points, "Z", fill=fill) + upper
        case Text():
            return svg.text(
                shape.x,
                # Digits are 0.72 of the size high; half of that below the middle is where the baseline goes.
                shape.y + 0.36 * shape.size,
                shape.text,
                font_size=shape.size,
                fill=shape.fill,
                font_weight="600" if shape.bold else None,
                text_anchor=shape.anchor if shape.anchor != "start" else None,
            )


def to_png(scene: Scene) -> bytes:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise UserError('PNG pictures need Pillow: pip install "fivefold[draw]"; or write an .svg instead') from None
    scale = min(SHARP, LARGEST / max(scene.width, scene.height))
    image = Image.new("RGB", (round(scene.width * scale), round(scene.height * scale)), PAPER)
    painter = _Painter(ImageDraw.Draw(image), scale, cache(ImageFont.load_default))
    for shape in scene.shapes:
        painter.paint(shape)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class _Painter:
    def __init__(self, draw: Any, scale: float, font: Callable[[float], Any]) -> None:
        self.draw, self.scale, self.font = draw, scale, font

    def paint(self, shape: Shape) -> None:
        match shape:
            case Rect(x, y, width, height, fill):
                self.rect(x, y, width, height, fill)
            case Hatch(x, y, width, height):
                self.hatch(x, y, width, height)
            case Line(x1, y1, x2, y2, stroke, width):
                thick = max(1, round(width * self.scale))
                self.draw.line(self.pixels(x1, y1, x2, y2), fill=stroke, width=thick)
            case Area(points, fill, stroke):
                outline = [self.pixels(*point) for point in points]
                self.draw.polygon(outline, fill=fill)
                self.draw.line(outline[1:-1], fill=stroke, width=max(1, round(self.scale)))
            case Text():
                self.text(shape)

    def pixels(self, *values: float) -> tuple[int, ...]:
        return tuple(round(value * self.scale) for value in values)

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> tuple[int, ...]:
        """Paints it, and returns its left, top, right and bottom."""
        left, top, right, bottom = self.pixels(x, y, x + width, y + height)
        if right > left and bottom > top:
            self.draw.rectangle((left, top, right - 1, bottom - 1), fill=fill)
        return left, top, right, bottom

    def hatch(self, x: float, y: float, width: float, height: float) -> None:
        left, top, right, bottom = self.rect(x, y, width, height, "#f6f7f9")
        # Lines x + y = constant, on a grid that runs through the whole picture, cut to the rectangle.
        step = round(7 * self.scale)
        for total in range((left + top) // step * step, right + bottom, step):
            x1, x2 = max(left, total - bottom + 1), min(right - 1, total - top)
            if x1 < x2:
                self.draw.line((x1, total - x1, x2, total - x2), fill="#d3d9e2", width=round(self.scale))

    def text(self, shape: Text) -> None:
        anchor = {"start": "lm", "middle": "mm", "end": "rm"}[shape.anchor]
        place, font = (shape.x * self.scale, shape.y * self.scale), self.font(shape.size * self.scale)
        stroke = 0.35 * self.scale if shape.bold else 0  # the font has one weight
        self.draw.text(place, shape.text, fill=shape.fill, font=font, anchor=anchor, stroke_width=stroke)
