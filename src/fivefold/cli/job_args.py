"""What several commands take: a job file and settings that change it."""

from typing import Annotated

import typer

from fivefold.support.errors import UserError

JobWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB.toml] [KEY=VALUE]...", help="A job file, and settings that change it.", show_default=False
    ),
]
RunWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB.toml | RUN] [KEY=VALUE]...",
        help="A job file or a run's directory, and settings that change its job.",
        show_default=False,
    ),
]


def whole_layout(layout: str | None, words: list[str], option: str = "--layout") -> None:
    """Refuse a layout that was cut by a space: `--layout dp=8 zero=3` gives the layout dp=8 and the word zero=3."""
    from fivefold.job.aliases import apart

    if problems := apart(words, layout or "", f"{option} "):
        raise UserError(problems)


def split(words: list[str] | None) -> tuple[str | None, list[str]]:
    """The job file, if any, and the KEY=VALUE changes: what has no '=' is the file."""
    files = [word for word in words or [] if "=" not in word]
    if len(files) > 1:
        raise UserError(f"one job file at most, and there are {len(files)}: {', '.join(files)}; changes are KEY=VALUE")
    return (files[0] if files else None), [word for word in words or [] if "=" in word]
