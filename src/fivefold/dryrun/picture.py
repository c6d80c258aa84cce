"""Memory through a step, as SVG: one line a rank, and a line for what the device has."""

from collections.abc import Sequence
from html import escape

from fivefold.dryrun.run import Dry

WIDTH, HEIGHT, LEFT, TOP = 720, 320, 64, 20
COLOURS = ("#3366cc", "#dc3912", "#ff9900", "#109618", "#990099", "#0099c6", "#dd4477", "#66aa00")


def curve(runs: Sequence[Dry], memory: int) -> str:
    """The most that each moment of the step reaches, from its first action to its new weights."""
    top = 1.05 * max(memory, *(run.peak for run in runs)) / 1e9
    height, width = TOP + HEIGHT + 24 + 16 * len(runs), LEFT + WIDTH + 16

    def up(size: float) -> float:
        return TOP + HEIGHT * (1 - size / 1e9 / top)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<line x1="{LEFT}" y1="{up(memory):.1f}" x2="{LEFT + WIDTH}" y2="{up(memory):.1f}" stroke="#c00" '
        'stroke-dasharray="6 4"/>',
        f'<text x="{LEFT - 6}" y="{up(memory) + 4:.1f}" text-anchor="end">{memory / 1e9:.0f} GB</text>',
        f'<text x="{LEFT - 6}" y="{TOP + HEIGHT}" text-anchor="end">0</text>',
    ]
    for at, run in enumerate(runs):
        colour, count = COLOURS[at % len(COLOURS)], max(1, len(run.moments) - 1)
        points = " ".join(
            f"{LEFT + WIDTH * index / count:.1f},{up(moment.peak):.1f}" for index, moment in enumerate(run.moments)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        y = TOP + HEIGHT + 20 + 16 * at
        label = f"rank {run.rank}: {run.peak / 1e9:.1f} GB at {run.peak_moment}"
        lines.append(f'<text x="{LEFT}" y="{y}" fill="{colour}">{escape(label)}</text>')
    return "\n".join([*lines, "</svg>", ""])
