"""A scene as PNG, painted with Pillow: its wheels carry their own font, so the text is there on a bare server too."""

import io
from typing import Any

from fivefold.schedule.draw.scene import PAPER, Area, Hatch, Line, Rect, Scene, Text
from fivefold.support.errors import UserError

SHARP, LARGEST = 2.0, 4000  # pixels per unit of the scene, as long as the picture stays below so many pixels


def to_png(scene: Scene) -> bytes:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise UserError('PNG pictures need Pillow: pip install "fivefold[draw]"; or write an .svg instead') from None
    scale = min(SHARP, LARGEST / max(scene.width, scene.height))
    image = Image.new("RGB", (round(scene.width * scale), round(scene.height * scale)), PAPER)
    painter = _Painter(ImageDraw.Draw(image), scale)
    for shape in scene.shapes:
        match shape:
            case Rect():
                painter.rect(shape)
            case Hatch():
                painter.hatch(shape)
            case Line():
                painter.line(shape)
            case Area():
                painter.area(shape)
            case Text():
                painter.text(shape)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class _Painter:
    def __init__(self, draw: Any, scale: float) -> None:
        self.draw, self.scale = draw, scale
        self.fonts: dict[float, Any] = {}

    def pixels(self, *values: float) -> tuple[int, ...]:
        return tuple(round(value * self.scale) for value in values)

    def rect(self, shape: Rect) -> None:
        left, top, right, bottom = self.pixels(shape.x, shape.y, shape.x + shape.width, shape.y + shape.height)
        if right > left and bottom > top:
            self.draw.rectangle((left, top, right - 1, bottom - 1), fill=shape.fill)

    def hatch(self, shape: Hatch) -> None:
        self.rect(Rect(*shape, fill="#f6f7f9"))
        left, top, right, bottom = self.pixels(shape.x, shape.y, shape.x + shape.width, shape.y + shape.height)
        # Lines x + y = constant, on a grid that runs through the whole picture, cut to the rectangle.
        step = round(7 * self.scale)
        for total in range((left + top) // step * step, right + bottom, step):
            x1, x2 = max(left, total - bottom + 1), min(right - 1, total - top)
            if x1 < x2:
                self.draw.line((x1, total - x1, x2, total - x2), fill="#d3d9e2", width=round(self.scale))

    def line(self, shape: Line) -> None:
        ends = self.pixels(shape.x1, shape.y1, shape.x2, shape.y2)
        self.draw.line(ends, fill=shape.stroke, width=max(1, round(shape.width * self.scale)))

    def area(self, shape: Area) -> None:
        points = [self.pixels(*point) for point in shape.points]
        self.draw.polygon(points, fill=shape.fill)
        self.draw.line(points[1:-1], fill=shape.stroke, width=max(1, round(self.scale)))

    def text(self, shape: Text) -> None:
        anchor = {"start": "lm", "middle": "mm", "end": "rm"}[shape.anchor]
        place, font = (shape.x * self.scale, shape.y * self.scale), self.font(shape.size)
        stroke = 0.35 * self.scale if shape.bold else 0  # the font has one weight
        self.draw.text(place, shape.text, fill=shape.fill, font=font, anchor=anchor, stroke_width=stroke)

    def font(self, size: float) -> Any:
        from PIL import ImageFont

        if size not in self.fonts:
            self.fonts[size] = ImageFont.load_default(size * self.scale)
        return self.fonts[size]
