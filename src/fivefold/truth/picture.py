"""Predicted against measured step times, as SVG: one dot a run, one colour a source, logarithmic both ways."""

import math
from collections.abc import Sequence

from fivefold.report.svg import COLOURS, circle, document, line, text
from fivefold.truth.score import RowScore

SIZE, LEFT, TOP = 560, 64, 24


def scatter(results: Sequence[RowScore]) -> str:
    """A dot on the diagonal is a prediction without error; the band is 10% wide on either side."""
    points = [
        (result.row.file, result.run.seconds, result.seconds)
        for result in results
        if result.error is not None and result.run and result.run.seconds and result.seconds
    ]
    low = math.floor(math.log10(min(min(x, y) for _, x, y in points))) if points else -1
    high = math.ceil(math.log10(max(max(x, y) for _, x, y in points))) if points else 1

    def across(value: float) -> float:
        return LEFT + SIZE * (math.log10(value) - low) / (high - low)

    def up(value: float) -> float:
        return TOP + SIZE - SIZE * (math.log10(value) - low) / (high - low)

    files = list(dict.fromkeys(name for name, _, _ in points))
    colour = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(files)}
    shapes: list[str] = []
    for power in range(low, high + 1):
        at = 10.0**power
        shapes += [
            line(across(at), TOP, across(at), TOP + SIZE, stroke="#ddd"),
            line(LEFT, up(at), LEFT + SIZE, up(at), stroke="#ddd"),
            text(across(at), TOP + SIZE + 16, f"{at:g} s", text_anchor="middle"),
            text(LEFT - 6, up(at) + 4, f"{at:g} s", text_anchor="end"),
        ]
    first, last = 10.0**low, 10.0**high
    for factor, style in ((1.0, "#333"), (1.1, "#aaa"), (1 / 1.1, "#aaa")):
        begin, end = first * max(1.0, 1 / factor), last * min(1.0, 1 / factor)
        shapes.append(line(across(begin), up(begin * factor), across(end), up(end * factor), stroke=style))
    for name, measured, predicted in points:
        shapes.append(circle(across(measured), up(predicted), 2.6, fill=colour[name], fill_opacity=0.55))
    for at, name in enumerate(files):
        y = TOP + 12 + 18 * at
        count = sum(one == name for one, _, _ in points)
        shapes.append(circle(LEFT + SIZE + 16, y - 4, 4, fill=colour[name]))
        shapes.append(text(LEFT + SIZE + 26, y, f"{name} ({count})"))
    middle = TOP + SIZE / 2
    shapes += [
        text(LEFT + SIZE / 2, TOP + SIZE + 40, "measured step time", text_anchor="middle"),
        text(16, middle, "predicted step time", text_anchor="middle", transform=f"rotate(-90 16 {middle})"),
    ]
    return document(LEFT + SIZE + 210, TOP + SIZE + 56, shapes, font_size=12)
