"""Memory through a step, as SVG: one line a rank, and a line for what the device has."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivefold.report.svg import COLOURS, document, line, path, text

if TYPE_CHECKING:
    from fivefold.dryrun.run import RankRun

WIDTH, HEIGHT, LEFT, TOP = 720, 320, 64, 20


def curve(runs: "Sequence[RankRun]", memory: int) -> str:
    """The most that each moment of the step reaches, from its first action to its new weights."""
    top = 1.05 * max(memory, *(run.peak for run in runs)) / 1e9

    def up(size: float) -> float:
        return TOP + HEIGHT * (1 - size / 1e9 / top)

    shapes = [
        line(LEFT, up(memory), LEFT + WIDTH, up(memory), stroke="#c00", stroke_dasharray="6 4"),
        text(LEFT - 6, up(memory) + 4, f"{memory / 1e9:.0f} GB", text_anchor="end"),
        text(LEFT - 6, TOP + HEIGHT, "0", text_anchor="end"),
    ]
    for at, run in enumerate(runs):
        colour, count = COLOURS[at % len(COLOURS)], max(1, len(run.moments) - 1)
        points = [(LEFT + WIDTH * index / count, up(moment.peak)) for index, moment in enumerate(run.moments)]
        label = f"rank {run.rank}: {run.peak / 1e9:.1f} GB at {run.peak_moment}"
        shapes += [
            path(points, fill="none", stroke=colour, stroke_width=1.4),
            text(LEFT, TOP + HEIGHT + 20 + 16 * at, label, fill=colour),
        ]
    return document(LEFT + WIDTH + 16, TOP + HEIGHT + 24 + 16 * len(runs), shapes, font_size=12)
