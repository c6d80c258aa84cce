"""A view as one file: everything is in it, and nothing is asked of anybody."""

import base64
import json
import re

import pytest

from fivefold.render import scene
from fivefold.web.question import Ask
from fivefold.web.report import STATIC, answered_view, html_page, page_view
from fivefold.web.views import View

TINY = Ask({"model": "tiny", "cluster": "2xCPU", "batch": "8", "seq": "64", "layout": "dp=2,zero=1,microbatches=2"})


def test_the_file_holds_what_the_server_would_send() -> None:
    view = answered_view("plan", TINY)
    page = html_page("tiny <plan>", [view])
    (text,) = re.findall(r'<script type="application/json" id="payload">(.*?)</script>', page, re.DOTALL)
    assert json.loads(text)["views"] == json.loads(json.dumps([view]))
    assert set(view["parts"]) == {"search", "why"}
    assert "tiny &lt;plan&gt;" in page
    assert len(page) < 1_000_000


@pytest.mark.parametrize("views", [["plan"], ["schedule"], ["mesh"], ["run"], ["accuracy"], ["trace", "verify"]])
def test_every_import_is_in_the_map_and_modules_of_other_views_are_not(views: list[str]) -> None:
    page = html_page("a page", [page_view(View(name, name, name), {}) for name in views])
    modules = json.loads(re.findall(r'<script type="importmap">(.*?)</script>', page)[0])["imports"]
    assert {f"fivefold/views/{name}.js" for name in views} <= set(modules)
    assert len(modules) < len([*STATIC.rglob("*.js")])
    for name, data in modules.items():
        text = base64.b64decode(data.partition(",")[2]).decode()
        wanted = re.findall(r'^import .*?from "([^"]+)";$', text, re.M)
        assert set(wanted) <= set(modules), name
        assert len(wanted) == len(re.findall(r"^import\b", text, re.M)), f"{name}: an import is not in one line"
        assert not re.findall(r"""["'`]\.{1,2}/""", text), name


def test_the_look_is_that_of_the_pictures() -> None:
    found = dict(re.findall(r"--([\w-]+): (#\w{6}|light-dark\([^)]*\));", (STATIC / "style.css").read_text()))
    for name in ("blue", "orange", "green", "purple", "sky", "red", "rest"):
        assert found[name] == getattr(scene, name.upper())
    for name, colour in {"ink": scene.INK, "rule": scene.PALE, "grey": scene.GREY, "track": scene.FAINT}.items():
        assert found[name] == f"light-dark({colour}, {scene.DARK[colour]})"


def _contrast(one: str, other: str) -> float:
    high, low = sorted((scene.light(scene.rgb(colour)) + 0.05 for colour in (one, other)), reverse=True)
    return high / low


def test_text_can_be_read() -> None:
    """WCAG's AA: 4.5 to 1, in light and in dark."""
    found = dict(re.findall(r"--([\w-]+): light-dark\(([^)]*)\);", (STATIC / "style.css").read_text()))
    pairs = [(ink, paper) for ink in ("ink", "dim", "accent", "good", "bad") for paper in ("card", "paper")]
    pairs += [(name, f"{name}-soft") for name in ("good", "bad", "accent")] + [("card", "accent")]
    pairs += [(ink, soft) for ink in ("ink", "dim") for soft in ("good-soft", "accent-soft")]
    for at in (0, 1):
        for ink, paper in pairs:
            colours = [found[name].split(", ")[at] for name in (ink, paper)]
            assert _contrast(*colours) >= 4.5, (ink, paper, at, colours)
