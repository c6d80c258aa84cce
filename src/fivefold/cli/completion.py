"""What a shell completes besides commands and options: names that a table has. A table is imported when Tab is pressed.

A path, which most of these arguments may also be, is left to the shell: it completes files where no name fits.
"""

import os
from collections.abc import Iterable

ASKED = "_FIVEFOLD_COMPLETE"  # set by the script that --show-completion prints


def models(incomplete: str) -> list[str]:
    from fivefold.spec.presets import PRESETS

    return _beginning(incomplete, PRESETS)


def accelerators(incomplete: str) -> list[str]:
    from fivefold.hardware.accelerators import ACCELERATORS

    return _beginning(incomplete, ACCELERATORS)


def schedules(incomplete: str) -> list[str]:
    from fivefold.schedules.registry import CATALOGUE

    return _beginning(incomplete, [*CATALOGUE, "mesh"])


def labs(incomplete: str) -> list[str]:
    from fivefold.labs.catalogue import LABS

    return _beginning(incomplete, (lab.name for lab in LABS))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def keep_to_a_line() -> None:
    """Have the description of a command stand on one line: wrapped at a terminal's width, as typer's are, its next line
    would be a candidate of its own in fish, and end zsh's list."""
    if ASKED in os.environ:
        os.environ["COLUMNS"] = "1000"
