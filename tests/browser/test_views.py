"""Every view, served and as one file: a quiet console, nothing asked of others, readable, named, whole."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.web.question import Ask
from fivefold.web.report import answered_view, html_page
from fivefold.web.views import VIEWS
from tests.browser.window import Window
from tests.web.serving import TOKEN, Server
from tests.web.test_report import proof

Opening = Callable[..., Window]
NAMES = [view.name for view in VIEWS]
LOOKED_AT = ("contrast", "names", "wide", "clipped", "overlapping", "flags")
WIDTHS = [1400, 390]
QWEN = "model=qwen3-30b-a3b&cluster=2x8xH100&batch=64&seq=4096"
STATES = {  # what a view shows beside what it begins with
    "far from fitting": "plan?model=llama3-70b&cluster=1x8xH100&batch=64&layout=dp=8,zero=1,microbatches=8",
    "one rank": "plan?model=llama3-8b&cluster=1x1xH100&batch=8&layout=microbatches=8",
    "cannot run": "plan?model=llama3-8b&cluster=8xH100&batch=64&layout=dp=8,tp=16,pp=2,zero=1,sp,microbatches=16",
    "experts and a pipeline": f"plan?{QWEN}&layout=dp=4,tp=2,pp=2,ep=4,cp=1,zero=1,sp,schedule=zb-v,microbatches=8",
    "a map of experts": f"mesh?{QWEN}&layout=dp=4,tp=2,pp=2,ep=4,zero=1,sp,microbatches=4&rank=5",
    "a map of many": "mesh?model=llama3-405b&cluster=2048x8xH100&batch=2048&seq=8192"
    "&layout=dp=64,tp=8,pp=16,cp=2,zero=1,sp,microbatches=32&rank=4203",
    "no such map": "mesh?model=llama3-8b&cluster=2x8xH100&batch=64&layout=dp=3,tp=4,pp=2,zero=1,sp,microbatches=8",
    "refused schedules": "schedule?schedule=dualpipe-v&pp=8&microbatches=6",
    "a long schedule": "schedule?schedule=dualpipe-v&pp=16&microbatches=64&times=comm=0.05,ep=0.5&slow=3=1.5",
    "experts published": "accuracy?kind=experts",
}


def sound(found: Window) -> dict[str, list[str]]:
    """What is wrong, by kind."""
    return found.audit(*LOOKED_AT) | ({"console": found.wrong} if found.wrong else {})


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", NAMES)
def test_a_view_is_sound(window: Opening, server: Server, view: str, width: int, dark: bool) -> None:
    found = window(view, width=width, dark=dark)
    assert sound(found) == {}
    assert found.one(f"tab-{view}").get_attribute("aria-current") == "page"
    assert found.page.evaluate("() => { const { scrollWidth, clientWidth } = tabs; return scrollWidth <= clientWidth }")
    assert all(address.startswith(f"http://127.0.0.1:{server.port}/") for address in found.asked)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("state", STATES)
def test_a_view_is_sound_in_every_state(window: Opening, state: str, width: int) -> None:
    found = window(STATES[state], width=width, dark=width == 390)
    assert {kind: wrong for kind, wrong in sound(found).items() if kind != "console"} == {}
    assert all("400" in wrong for wrong in found.wrong)  # what cannot be answered


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", NAMES)
def test_a_view_is_sound_as_one_file(
    window: Opening, runs: tuple[Path, ...], tmp_path: Path, view: str, width: int
) -> None:
    file = tmp_path / "view.html"
    file.write_text(html_page(view, [answered_view(view, Ask({}, runs))]))
    assert file.stat().st_size < 3_000_000
    found = window(file=file, width=width)
    assert sound(found) == {}
    assert [address for address in found.asked if not address.startswith("data:")] == [f"file://{file}"]


def test_a_plan_as_one_file_has_its_mesh_and_its_schedule(window: Opening, tmp_path: Path) -> None:
    layout = "dp=2,tp=2,pp=4,zero=1,sp,microbatches=8"
    plan = ff.plan("llama3-8b", "2x8xH100", layout=layout, batch=64, seq=8192)
    assert plan.given is not None
    ff.report(plan, tmp_path / "plan.html")
    found = window(file=tmp_path / "plan.html")
    for view in ("plan", "mesh", "schedule"):
        found.one(f"tab-{view}").click()
        found.page.wait_for_selector(f'[data-testid="view-{view}"]')
        found.settle()
        assert sound(found) == {}, view
    timed = plan.given.estimate.simulation
    assert timed is not None
    assert found.text("makespan") == f"{timed.makespan:.4g}"
    assert found.one("every-card").is_hidden()
    found.one("tab-mesh").click()
    found.one("cluster").press("ArrowRight")
    assert found.text("rank") == "Rank 1 · node 0"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_proof_as_one_file_is_sound(window: Opening, tmp_path: Path, width: int) -> None:
    (tmp_path / "verify.json").write_text(json.dumps(proof()))
    ff.report(tmp_path / "verify.json", tmp_path / "verify.html")
    found = window(file=tmp_path / "verify.html", width=width)
    assert sound(found) == {}
    assert found.one("proof").count() == 1


@pytest.mark.parametrize("view", NAMES)
def test_nothing_moves_for_those_who_want_no_motion(window: Opening, view: str) -> None:
    found = window(view, still=True)
    assert found.audit("moving") == {}


HELD = """(() => {
  const ask = fetch, gate = new Promise(open => { window.open_gate = open; });
  window.fetch = async (address, more) => {
    if (/^api.plan/.test(address)) { window.waits = true; await gate; }
    return ask(address, more);
  };
})()"""


def test_a_view_that_was_left_does_not_take_the_address_back(chrome: Any, server: Server) -> None:
    """Its answer was on the way when the user went to another."""
    found = Window(chrome.new_page())
    found.page.add_init_script(HELD)
    found.page.goto(f"http://127.0.0.1:{server.port}/#token={TOKEN}")
    found.page.wait_for_function("() => window.waits")
    found.one("tab-schedule").click()
    found.page.wait_for_selector('[data-testid="view-schedule"]')
    found.page.evaluate("() => window.open_gate()")
    found.settle()
    assert "#schedule" in found.page.url
    assert found.one("view-schedule").count() == 1
    found.page.close()


def test_the_switch_overrules_the_system_and_is_kept(window: Opening) -> None:
    found = window("plan", dark=False)
    paper = "() => getComputedStyle(document.body).backgroundColor"
    light = found.page.evaluate(paper)
    found.one("theme").click()
    assert (found.text("theme"), found.page.evaluate(paper)) == ("Theme: light", light)
    found.one("theme").click()
    dark = found.page.evaluate(paper)
    assert (found.text("theme"), dark == light) == ("Theme: dark", False)
    found.page.reload()
    found.settle()
    assert found.page.evaluate(paper) == dark


FAULTS = """<html><body style="background:#fff">
<p style="color:#999">pale</p><button></button><svg width=9 height=9></svg>
<svg aria-label=x><rect width=99 height=30 fill="#00f"></rect><text y=20 fill="#222">over a bar</text></svg>
<p style="width:5000px">wide</p><div style="width:90px;overflow:auto"><p style="width:300px">a wide table</p></div>
<div style="height:20px;overflow:auto"><p style="height:90px">tall</p></div>
<select style="width:60px"><option>a long choice</select>
<svg aria-label=y width=40><text y=20>beyond its edge</text></svg>
<svg aria-label=z width=300><text y=20>one</text><text x=9 y=20>other</text></svg>
<main>write --layout tp=8, as in `fivefold plan --fix tp=8`</main><p style="transition:opacity 2s">moves</p>
<a href="#" tabindex=3>first</a><p id=a></p><p id=a></p>"""


def test_the_audit_finds_what_is_wrong(chrome: Any) -> None:
    found = Window(chrome.new_page())
    found.page.set_content(FAULTS)
    wrong = found.audit(*LOOKED_AT, "moving")
    assert [said[:22] for said in wrong["contrast"]] == ['2.85 to 1: "pale" in <', '1.85 to 1: "over a bar']
    assert [said.partition(":")[0] for said in wrong["names"]] == [
        "no name", "jumps the order", "a picture without a name", "the id a is there twice",
        "the page does not say its language",
    ]  # fmt: skip
    assert wrong["wide"][0].startswith("the page is 50")
    assert wrong["moving"] == ["<p >"]
    assert [re.sub(r"\d+", "N", said) for said in wrong["clipped"]] == [
        "<div > shows N of N across", "<div > shows N of N down", '<select > cuts "a long choice"',
        '"beyond its edge" leaves its picture',
    ]  # fmt: skip
    assert wrong["overlapping"] == ['"one" meets "other"']
    assert wrong["flags"] == ["--layout"]
    found.page.close()
