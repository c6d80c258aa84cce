"""Writes SVG with plain shapes and text, without scripts or fonts, for slides, papers and web pages.

    document(200, 100, [rect(0, 0, 50, 20, fill="#3366cc"), text(4, 14, "rank 0")])

A shape is a string. Attributes are Python's names for SVG's: `stroke_width=2` is `stroke-width="2"`.
"""

from collections.abc import Iterable, Mapping
from html import escape

Attribute = str | float | None  # None is left out


def document(
    width: float,
    height: float,
    shapes: Iterable[str],
    *,
    title: str = "",
    background: str = "white",
    font: str = "sans-serif",
    font_size: float | None = None,
) -> str:
    """A picture of this size, which scales with its page. The title is for screen readers."""
    head = [element("title", {}, _escaped(title))] if title else []
    attributes: dict[str, Attribute] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "width": width,
        "height": height,
        "viewBox": f"0 0 {number(width)} {number(height)}",
        "font_family": font,
        "font_size": font_size,
        "role": "img",
    }
    paper = rect(None, None, width, height, fill=background)
    return element("svg", attributes, "\n".join(["", *head, paper, *shapes, ""])) + "\n"


def rect(
    x: float | None, y: float | None, width: float, height: float, hint: str = "", /, **attributes: Attribute
) -> str:
    """A rectangle; the `hint` is shown when the mouse rests on it."""
    inner = element("title", {}, _escaped(hint)) if hint else ""
    return element("rect", {"x": x, "y": y, "width": width, "height": height} | attributes, inner)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: Attribute) -> str:
    return path([(x1, y1), (x2, y2)], **attributes)


def path(points: Iterable[tuple[float, float]], end: str = "", /, **attributes: Attribute) -> str:
    """Straight lines from point to point; with the end "Z" back to the first."""
    steps = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return element("path", {"d": f"M{steps}{end}"} | attributes)


def circle(x: float, y: float, radius: float, **attributes: Attribute) -> str:
    return element("circle", {"cx": x, "cy": y, "r": radius} | attributes)


def text(x: float, y: float, words: str, **attributes: Attribute) -> str:
    """Text with its baseline at `y`; `text_anchor` says which end of it is at `x`."""
    return element("text", {"x": x, "y": y} | attributes, _escaped(words))


def element(tag: str, attributes: Mapping[str, Attribute], inner: str = "") -> str:
    """Any element; `inner` is SVG, which is not escaped again."""
    text = "".join(
        f' {name.replace("_", "-")}="{_escaped(value) if isinstance(value, str) else number(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{text}>{inner}</{tag}>" if inner else f"<{tag}{text}/>"


def _escaped(words: str) -> str:
    """Words as text of XML, in which most control characters cannot be written and become "?"."""
    return escape("".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in words))


def number(value: float) -> str:
    """A number with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
