"""Predicted against measured step times: a mark for each run, the diagonal, and bands that say how far off it is."""

import math
from collections.abc import Sequence

from fivefold.report.chart import TOP, Plot, sheet
from fivefold.report.look import COLOURS, FAINT, GREY, INK, LABEL, MARGIN, PALE, SMALL, WIDTH
from fivefold.report.scene import SHAPES, Area, Curve, Mark, Scene, Text, cut
from fivefold.truth.score import RowScore

HEIGHT, LEFT, WIDE = 880.0, 128.0, 690.0
BANDS = (0.25, 0.10)  # on either side of the diagonal, the wider behind
SHADES = (FAINT, PALE)


def scatter(results: Sequence[RowScore]) -> Scene:
    """A mark on the diagonal is a prediction without error; sources have a colour and a shape each."""
    points = [
        (result.row.file, result.run.seconds, result.seconds)
        for result in results
        if result.error is not None and result.run and result.run.seconds and result.seconds
    ]
    spread = [value for _, *both in points for value in both] or [0.1, 10]
    low, high = 10.0 ** math.floor(math.log10(min(spread))), 10.0 ** math.ceil(math.log10(max(spread)))
    near = sum(abs(predicted / measured - 1) <= BANDS[-1] for _, measured, predicted in points)
    share = f"; {near / len(points):.0%} of them within 10%" if points else ""
    files = list(dict.fromkeys(name for name, _, _ in points))
    said = f"{len(points)} measured runs of {len(files)} sources{share}"
    scene = sheet("Step times: predicted against measured", said, HEIGHT, "predicted against measured step times")
    plot = Plot(scene, LEFT, TOP, WIDE, HEIGHT - TOP - 70, (low, low), (high, high), log=True)
    for band, shade in zip(BANDS, SHADES, strict=True):
        scene.shapes.append(_band(plot, band, shade))
    plot.axis_x("measured, seconds per step", "{:g}".format)
    plot.axis_y("predicted, seconds per step", "{:g}".format)
    scene.shapes.append(Curve(((plot.x(low), plot.y(low)), (plot.x(high), plot.y(high))), GREY, 1.5))
    look = {name: (COLOURS[at % len(COLOURS)], at // len(COLOURS) % SHAPES) for at, name in enumerate(files)}
    for name, measured, predicted in points:
        colour, shape = look[name]
        scene.shapes.append(Mark(plot.x(measured), plot.y(predicted), 4.2, colour, shape, 0.6))
    _legend(scene, {name: sum(one == name for one, _, _ in points) for name in files}, look)
    return scene


def _band(plot: Plot, share: float, shade: str) -> Area:
    """Predictions between 1/(1+share) and 1+share of what was measured."""
    low, high, factor = plot.low[0], plot.high[0], 1 + share
    above = ((low, low * factor), (high / factor, high))
    below = ((high, high / factor), (low * factor, low))
    corners = ((low, low), *above, (high, high), *below)
    return Area(tuple((plot.x(x), plot.y(y)) for x, y in corners), shade, shade)


def _legend(scene: Scene, counts: dict[str, int], look: dict[str, tuple[str, int]]) -> None:
    """Right of the plot: the bands, the diagonal, then the sources with their numbers of runs."""
    x, y = LEFT + WIDE + 44, TOP + 10
    room = WIDTH - MARGIN / 2 - x
    for share, shade in zip(reversed(BANDS), reversed(SHADES), strict=True):
        scene.shapes += [
            Area(((x, y - 7), (x, y - 7), (x + 26, y - 7), (x + 26, y + 7), (x, y + 7)), shade, shade),
            Text(x + 36, y, f"within {share:.0%}", LABEL),
        ]
        y += 26
    scene.shapes += [Curve(((x, y), (x + 26, y)), GREY, 1.5), Text(x + 36, y, "no error", LABEL)]
    scene.shapes.append(Text(x, y + 36, "source (runs)", LABEL, bold=True))
    y += 62
    step = min(24.0, (HEIGHT - 40 - y) / max(1, len(counts)))
    size = min(SMALL, 0.82 * step)
    for at, (name, count) in enumerate(counts.items()):
        colour, shape = look[name]
        words = cut(f"{name} ({count})", size, room - 26)
        scene.shapes += [
            Mark(x + 8, y + at * step, 5, colour, shape),
            Text(x + 26, y + at * step, words, size, fill=INK),
        ]
