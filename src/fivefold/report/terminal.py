"""Blocks on a terminal, and as plain text."""

import os
import re
from collections.abc import Iterable
from io import StringIO

from rich.console import Console
from rich.text import Text as RichText

from fivefold.report import fit
from fivefold.report.blocks import Block, Drawing, Table, Text

STYLES = {"": "", "bold": "bold", "dim": "dim", "good": "green", "bad": "bold red"}


_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # by terminals, or not to be encoded


def _inert(text: str) -> str:
    """Names come from files: what a terminal would obey is shown as an escape."""
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


def console_of(stderr: bool = False) -> Console:
    """For everything that the program prints: numbers are not coloured, and nothing is cut."""
    columns = os.environ.get("COLUMNS", "")
    unknown = columns.isdigit() and int(columns) < 1  # some shells say 0 where there is no terminal
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=80 if unknown else None)


def width_of(console: Console) -> int | None:
    """Columns there are; None, which is any number, where the output goes into a file or a pipe."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS") else None


def render(blocks: Iterable[Block], console: Console, width: int | None) -> None:
    for block in blocks:
        if isinstance(block, Text):
            whole = width is None or block.typed
            console.print(RichText(_inert(block.text), STYLES[block.style]), soft_wrap=whole, width=width)
        elif isinstance(block, Drawing):
            console.print(block.draw(width or 120, console.color_system is not None), no_wrap=True, crop=True)
        else:
            _table(block, console, width)


def _table(table: Table, console: Console, width: int | None) -> None:
    if table.title:
        console.print(RichText(_inert(f"\n{table.title}"), "bold underline"), soft_wrap=width is None, width=width)
    for line in fit.lines(table, width):
        text = RichText.assemble(*((_inert(text), STYLES[style]) for text, style in line))
        console.print(text, no_wrap=True, overflow="ignore", crop=False)
    if table.caption:
        console.print(RichText(_inert(table.caption), "dim"), soft_wrap=width is None, width=width)


def to_text(blocks: Iterable[Block], width: int | None = None) -> str:
    """Without colours: what `print` and files get."""
    out = StringIO()
    render(blocks, Console(file=out, highlight=False, width=width or 10_000, color_system=None), width)
    return out.getvalue()
