"""Pictures of schedules: SVG and PNG files, and a coloured view for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from fivefold.schedule.draw.picture import picture
from fivefold.schedule.draw.png import to_png
from fivefold.schedule.draw.svg import to_svg
from fivefold.schedule.draw.terminal import legend, legend_text, timeline, to_terminal
from fivefold.schedule.files import write
from fivefold.schedule.simulate import Simulation
from fivefold.support.errors import UserError

__all__ = [
    "PICTURES",
    "legend",
    "legend_text",
    "picture",
    "save_picture",
    "timeline",
    "to_png",
    "to_svg",
    "to_terminal",
]

PICTURES = (".svg", ".png")


def save_picture(simulations: Sequence[Simulation], path: Path) -> None:
    """Draw one or several simulations into one file; the suffix decides about the format."""
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise UserError(f"a picture is an .svg or a .png file, and {path} ends in {path.suffix or 'nothing'!r}")
    scene = picture(simulations)
    write(path, to_png(scene) if suffix == ".png" else to_svg(scene).encode())
