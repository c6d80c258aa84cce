"""Views to embed in a page: what a command's `--html` writes, in a frame.

A line of Markdown asks for one, and nobody sees it on GitHub:

    <!-- widget: draw zb-v --pp 4 --microbatches 8 -->
    <!-- widget: plan llama3-8b --cluster 8xH100 --view schedule -->

The words are those of `fivefold draw` or `fivefold plan`. `--view NAME` shows one of several views, without tabs.
"""

import hashlib
import html
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.support.errors import UserError
from website.pages import prose

FOLDER = "widgets"
COMMANDS = ("draw", "plan")  # which need no ranks, and nothing of this machine
HEIGHT = 640  # pixels, until the view has said how high it is
_LINE = re.compile(r"^<!-- *widget: *(.+?) *-->$", re.M)


class Widget(NamedTuple):
    """A view: the words of its command, and the name of the one to show, if there are several."""

    words: tuple[str, ...]
    view: str = ""

    @property
    def command(self) -> str:
        return shlex.join(("fivefold", *self.words))

    @property
    def file(self) -> str:
        """The same words make the same file."""
        return f"{FOLDER}/{self.words[0]}-{hashlib.sha256(shlex.join(self.words).encode()).hexdigest()[:12]}.html"


def widget_of(line: str) -> Widget:
    """The widget that the words after `widget:` ask for."""
    words = shlex.split(line)
    view = ""
    if "--view" in words:
        at = words.index("--view")
        view = " ".join(words[at + 1 : at + 2])
        del words[at : at + 2]
    if not words or words[0] not in COMMANDS:
        raise ValueError(f"widget: {line}: a widget is made by {' or '.join(COMMANDS)}, which run without ranks")
    return Widget(tuple(words), view)


def widgets(text: str) -> list[Widget]:
    """Those that a page asks for, but not in its code."""
    return [widget_of(line) for line in _LINE.findall(prose(text))]


def made(widget: Widget) -> str:
    """The page of a widget's command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "view.html"
        typed, sys.argv = sys.argv, ["fivefold", *widget.words]  # the page names the command that made it
        try:
            done = CliRunner().invoke(app, [*widget.words, "--quiet", "--html", str(file)])
        finally:
            sys.argv = typed
        if isinstance(done.exception, UserError):
            raise ValueError(f"{widget.command}: {done.exception}")
        if not file.is_file():
            raise ValueError(f"{widget.command}: {done.output}{done.exception or ''}")
        return file.read_text()


def embedded(text: str, to_root: str) -> str:
    """The Markdown with a frame for each widget. `to_root` leads from the page to the site's root."""
    for match in reversed([*_LINE.finditer(prose(text))]):
        text = text[: match.start()] + _frame(widget_of(match[1]), to_root) + text[match.end() :]
    return text


def _frame(widget: Widget, to_root: str) -> str:
    command = html.escape(widget.command)
    address = f"{to_root}{widget.file}{f'#{widget.view}' if widget.view else ''}"
    return (
        f'<figure class="widget"><iframe src="{address}" title="{command}" height="{HEIGHT}" loading="lazy"></iframe>'
        f'<figcaption><code>{command}</code> <a href="{address}" target="_blank">in a window of its own</a>'
        "</figcaption></figure>"
    )
