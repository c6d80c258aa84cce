"""Predicted against measured step times, as SVG: one dot a run, one colour a source, logarithmic both ways."""

import math
from collections.abc import Sequence
from html import escape

from fivefold.truth.score import Result

SIZE, LEFT, TOP = 560, 64, 24
COLOURS = ("#3366cc", "#dc3912", "#ff9900", "#109618", "#990099", "#0099c6", "#dd4477", "#66aa00", "#b82e2e", "#316395",
           "#994499", "#22aa99")  # fmt: skip


def scatter(results: Sequence[Result]) -> str:
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
    width, height = LEFT + SIZE + 210, TOP + SIZE + 56
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for power in range(low, high + 1):
        at = 10.0**power
        label = f"{at:g} s"
        lines.append(
            f'<path d="M{across(at):.1f} {TOP}V{TOP + SIZE}M{LEFT} {up(at):.1f}H{LEFT + SIZE}" stroke="#ddd"/>'
        )
        lines.append(f'<text x="{across(at):.1f}" y="{TOP + SIZE + 16}" text-anchor="middle">{label}</text>')
        lines.append(f'<text x="{LEFT - 6}" y="{up(at) + 4:.1f}" text-anchor="end">{label}</text>')
    first, last = 10.0**low, 10.0**high
    for factor, style in ((1.0, "#333"), (1.1, "#aaa"), (1 / 1.1, "#aaa")):
        begin, end = first * max(1.0, 1 / factor), last * min(1.0, 1 / factor)
        lines.append(
            f'<line x1="{across(begin):.1f}" y1="{up(begin * factor):.1f}" x2="{across(end):.1f}" '
            f'y2="{up(end * factor):.1f}" stroke="{style}"/>'
        )
    for name, measured, predicted in points:
        lines.append(
            f'<circle cx="{across(measured):.1f}" cy="{up(predicted):.1f}" r="2.6" fill="{colour[name]}" '
            'fill-opacity="0.55"/>'
        )
    for at, name in enumerate(files):
        y = TOP + 12 + 18 * at
        count = sum(one == name for one, _, _ in points)
        lines.append(f'<circle cx="{LEFT + SIZE + 16}" cy="{y - 4}" r="4" fill="{colour[name]}"/>')
        lines.append(f'<text x="{LEFT + SIZE + 26}" y="{y}">{escape(name)} ({count})</text>')
    lines.append(f'<text x="{LEFT + SIZE / 2}" y="{TOP + SIZE + 40}" text-anchor="middle">measured step time</text>')
    lines.append(
        f'<text x="16" y="{TOP + SIZE / 2}" text-anchor="middle" transform="rotate(-90 16 {TOP + SIZE / 2})">'
        "predicted step time</text>"
    )
    return "\n".join([*lines, "</svg>", ""])
