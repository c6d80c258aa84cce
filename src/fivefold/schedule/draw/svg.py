"""A scene as SVG."""

from fivefold.report import svg
from fivefold.schedule.draw.scene import PAPER, Area, Hatch, Line, Rect, Scene, Shape, Text

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
