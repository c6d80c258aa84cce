"""A view as one HTML file: its payload, its scripts and its look in one, which needs neither a server nor a network.

page = whole("a plan", [held("plan", Ask({"model": "llama3-70b", "cluster": "8x8xH100"}))])

The scripts are those of the page, as they are; only how modules name each other is changed, from a path to an entry of
the file's import map.
"""

import base64
import html
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fivefold.ui.ask import Ask
from fivefold.ui.views import View, answer, view_of

STATIC = Path(__file__).parent / "static"
POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:"
_IMPORTED = re.compile(r"""(["'`])(\.{1,2}/[^"'`\n]+\.js)\1""")
_HEAD = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta http-equiv="Content-Security-Policy" content="{policy}">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>{title}</title>
  <style>{style}</style>
  <script type="importmap">{modules}</script>
  <script type="application/json" id="payload">{payload}</script>
  <script type="module">import "fivefold/app.js";</script>
</head>
"""


def view(of: str | View, payload: Any, parts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A view with what it shows."""
    one = of if isinstance(of, View) else view_of(of)
    return {"name": one.name, "title": one.title, "says": one.says, "payload": payload, "parts": dict(parts or {})}


def held(name: str, ask: Ask, parts: Sequence[str] | None = None) -> dict[str, Any]:
    """A view with its payload and its parts, all or those that are named; the payload `asks` for them."""
    payload = answer(name, "", ask)
    asks = {part: words for part, words in payload.get("asks", {}).items() if parts is None or part in parts}
    found = {part: answer(name, part, Ask(words, ask.runs)) for part, words in asks.items()}
    return view(name, payload, found)


def whole(title: str, views: Sequence[dict[str, Any]], made: Mapping[str, str] | None = None) -> str:
    """The page of these views, each as `view` or `held` has it; `made`: by what, by which command, on which day."""
    names = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js")]
    modules = {f"fivefold/{name}": _data("text/javascript", _by_name(name)) for name in sorted(names)}
    body = (STATIC / "index.html").read_text().partition("<body>")[2]
    icon = _data("image/svg+xml", (STATIC / "icon.svg").read_text())
    head = _HEAD.format(
        policy=POLICY, title=html.escape(title), style=(STATIC / "style.css").read_text(),
        modules=_json({"imports": modules}), payload=_json({"title": title, "made": made, "views": list(views)}),
    )  # fmt: skip
    return f"{head}<body>{body.replace('icon.svg', icon)}"


def _by_name(name: str) -> str:
    """A module's text, in which others have their names of the import map."""
    folder = posixpath.dirname(name)

    def renamed(found: re.Match[str]) -> str:
        return f"{found[1]}fivefold/{posixpath.normpath(posixpath.join(folder, found[2]))}{found[1]}"

    return _IMPORTED.sub(renamed, (STATIC / name).read_text())


def _data(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _json(value: Any) -> str:
    """As the text of a script element: nothing in it can end that element, or a line of a script."""
    text = msgspec.json.encode(value).decode()
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
