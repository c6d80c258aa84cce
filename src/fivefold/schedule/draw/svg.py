"""A scene as SVG: plain shapes and text, no scripts, no fonts of its own; fit for slides, papers and web pages."""

from html import escape

from fivefold.schedule.draw.scene import PAPER, Area, Hatch, Line, Rect, Scene, Shape, Text

FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"


def to_svg(scene: Scene) -> str:
    width, height = _number(scene.width), _number(scene.height)
    body = "\n".join(_element(shape) for shape in scene.shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{FONT}" role="img">\n<title>{escape(scene.title)}</title>\n'
        f"{_HATCH}\n"
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


_HATCH = (
    '<defs><pattern id="idle" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="5" height="5" fill="#f6f7f9"/><path d="M0 0V5" stroke="#d3d9e2" stroke-width="1.6"/></pattern></defs>'
)


def _element(shape: Shape) -> str:
    match shape:
        case Rect(x, y, width, height, fill, hint):
            box = f'<rect {_place(x, y, width, height)} fill="{fill}"'
            return f"{box}><title>{escape(hint)}</title></rect>" if hint else f"{box}/>"
        case Hatch(x, y, width, height):
            return f'<rect {_place(x, y, width, height)} fill="url(#idle)"/>'
        case Line(x1, y1, x2, y2, stroke, width):
            path = f"M{_number(x1)} {_number(y1)}L{_number(x2)} {_number(y2)}"
            return f'<path d="{path}" stroke="{stroke}" stroke-width="{_number(width)}"/>'
        case Area(points, fill, stroke):
            outline = "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
            upper = "L".join(f"{_number(x)} {_number(y)}" for x, y in points[1:-1])
            return (
                f'<path d="M{outline}Z" fill="{fill}"/>'
                f'<path d="M{upper}" fill="none" stroke="{stroke}" stroke-width="1.2" stroke-linejoin="round"/>'
            )
        case Text():
            return _text(shape)


def _text(text: Text) -> str:
    weight = ' font-weight="600"' if text.bold else ""
    anchor = f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
    # Digits are 0.72 of the size high; half of that below the middle is where the baseline goes.
    x, y = _number(text.x), _number(text.y + 0.36 * text.size)
    return (
        f'<text x="{x}" y="{y}" font-size="{_number(text.size)}" fill="{text.fill}"{weight}{anchor}>'
        f"{escape(text.text)}</text>"
    )


def _place(x: float, y: float, width: float, height: float) -> str:
    return f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
