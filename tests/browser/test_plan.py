"""The Plan view in a browser: sliders and keys change its figures to what the Python API says of that layout."""

import random
from collections.abc import Callable
from typing import Any

import pytest

import fivefold as ff
from tests.browser.window import Window
from tests.web.serving import TOKEN, Server

Opening = Callable[..., Window]
SMALL = ("plan", "llama3-8b", "8xH100", "dp=8,zero=3,microbatches=16", 128, 8192)
LARGE = ("plan", "llama3-405b", "2048x8xH100", "dp=128,tp=8,pp=16,zero=1,sp,microbatches=16", 2048, 8192)
EXPERTS = ("plan", "qwen3-30b-a3b", "2x8xH100", "dp=16,ep=8,zero=1,microbatches=8", 128, 4096)


def address(case: tuple[Any, ...]) -> str:
    view, model, cluster, layout, batch, seq = case
    return f"{view}?model={model}&cluster={cluster}&batch={batch}&seq={seq}&layout={layout}"


def three(value: float) -> str:
    """As the page writes a figure: three digits that count."""
    return f"{round(value):,}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def figures(case: tuple[Any, ...], layout: str) -> dict[str, str]:
    """What the page should say, of what `simulate` says."""
    _, model, cluster, _, batch, seq = case
    found = ff.simulate(model, layout, cluster, batch=batch, seq=seq).to_dict()
    seconds, size = found["step_seconds"], found["memory_bytes"]
    return {
        "step": three(seconds) if seconds >= 1 else three(1e3 * seconds),
        "rate": f"{found['tokens_per_second_per_gpu']:,.0f}",
        "mfu": f"{100 * found['mfu']:.1f}" if found["fits"] else "—",  # what does not fit reaches nothing
        "memory": f"{size / 1e9:.{2 if size < 99.5e9 else 1}f}",
    }


def shown(page: Window) -> tuple[str, dict[str, str]]:
    """The layout whose figures these are: that of the address, or the nearest that can run; and the figures."""
    near = page.one("nearest")
    layout = page.text("nearest") if near.count() else in_address(page)
    return layout, {name: page.text(name) for name in ("step", "rate", "mfu", "memory")}


def in_address(page: Window) -> str:
    words = page.page.evaluate("() => Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))")
    return str(words["layout"])


def agrees(page: Window, case: tuple[Any, ...]) -> str:
    """The layout that is shown, whose figures are those of Python to the last digit."""
    layout, found = shown(page)
    assert found == figures(case, layout), layout
    return layout


@pytest.mark.parametrize("case", [SMALL, LARGE, EXPERTS], ids=lambda case: case[1])
def test_sliders_bring_the_figures_of_simulate(window: Opening, case: tuple[Any, ...]) -> None:
    page, choose = window(address(case)), random.Random(case[1])
    sliders = ["tp", "pp", "cp", "zero", "microbatches", "recompute", *(["ep"] if case is EXPERTS else [])]
    met = set()
    for _ in range(8):
        slider = page.one(f"slider-{choose.choice(sliders)}")
        if slider.is_enabled():
            right = slider.input_value() != slider.get_attribute("max") and choose.random() < 0.7
            slider.press("ArrowRight" if right else "ArrowLeft")
        page.settle()
        met.add(agrees(page, case))
    assert len(met) >= 4
    assert page.wrong == []


def test_a_drag_ends_at_the_last_value(window: Opening) -> None:
    """Many moves one after the other: answers that come late must not win."""
    page = window(address(LARGE))
    slider = page.one("slider-tp")
    box = slider.bounding_box()
    page.page.mouse.move(box["x"] + 3, box["y"] + box["height"] / 2)
    page.page.mouse.down()
    for step in range(1, 20):
        page.page.mouse.move(box["x"] + step * box["width"] / 20, box["y"] + box["height"] / 2)
    page.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + box["height"] / 2)
    page.page.mouse.up()
    page.settle()
    agrees(page, LARGE)
    steps = page.page.evaluate("() => document.querySelector('[data-testid=\"slider-tp\"]').max")
    assert 0 < int(slider.input_value()) < int(steps)


def test_a_layout_that_cannot_run_says_so_and_can_be_left(window: Opening) -> None:
    case = ("plan", "llama3-70b", "8x8xH100", "dp=2,tp=8,pp=4,zero=1,sp,microbatches=256", 512, 8192)
    page = window(address(case))
    agrees(page, case)
    page.one("slider-tp").press("End")
    page.settle()
    assert "This cannot run." in page.text("problems")
    assert page.one("slider-tp").get_attribute("aria-invalid") == "true"
    near = agrees(page, case)
    assert near == page.text("nearest") != in_address(page)
    fits = ff.simulate(*case[1:2], near, case[2], batch=case[4], seq=case[5]).to_dict()["fits"]
    assert ("does not fit either" in page.text("nearest-fits")) is not fits
    page.page.reload()  # as one who was sent the link
    page.settle()
    assert "This cannot run." in page.text("problems")
    agrees(page, case)
    page.one("take-nearest").click()
    page.settle()
    agrees(page, case)
    assert page.one("problems").count() == 0
    assert agrees(page, case) == in_address(page)
    assert page.one("slider-tp").get_attribute("aria-invalid") == "false"


def test_the_keyboard_reaches_everything_in_order(window: Opening) -> None:
    page = window(address(SMALL))
    page.page.keyboard.press("Tab")
    assert page.focused() == "skip"
    page.page.keyboard.press("Enter")
    assert page.focused() == "main"
    met = []
    for _ in range(17):
        page.page.keyboard.press("Tab")
        met.append(page.focused())
        ring = "() => getComputedStyle(document.activeElement).outlineStyle"
        assert page.page.evaluate(ring) != "none", met[-1]
    question = ["select-model", "number-nodes", "number-gpus", "select-accelerator", "number-batch", "number-seq"]
    question += ["select-precision", "select-software"]
    sliders = [f"slider-{name}" for name in ("dp", "tp", "pp", "cp", "zero", "replicate", "microbatches", "recompute")]
    assert met[: len(question)] == question
    assert met[len(question) : len(question) + len(sliders)] == sliders


@pytest.mark.parametrize("key", ["ArrowRight", "ArrowLeft", "Home", "End"])
def test_keys_move_a_slider_and_are_spoken(window: Opening, key: str) -> None:
    page = window(address(SMALL).replace("microbatches=16", "microbatches=4"))
    slider = page.one("slider-microbatches")
    before = int(slider.input_value())
    slider.press(key)
    page.settle()
    after, most = int(slider.input_value()), int(slider.get_attribute("max"))
    assert after == {"ArrowRight": before + 1, "ArrowLeft": before - 1, "Home": 0, "End": most}[key]
    assert slider.get_attribute("aria-valuetext") == page.text("microbatches-value")
    assert page.one("verdict").get_attribute("aria-live") == "polite"


def test_back_leads_to_the_question_before(window: Opening) -> None:
    page = window(address(SMALL))
    page.page.evaluate("hash => { location.hash = hash }", address(EXPERTS))
    page.settle()
    assert "qwen3-30b-a3b" in page.page.url
    page.page.go_back()
    page.settle()
    assert "llama3-8b" in page.page.url
    assert agrees(page, SMALL) == SMALL[3]


def test_the_ranking_compares_two(window: Opening) -> None:
    page = window("plan?model=llama3.2-1b&cluster=2xH100&batch=64&seq=8192")
    ranked = ff.plan("llama3.2-1b", "2xH100", batch=64, seq=8192, top=12).to_dict()
    rows = page.one("ranking").locator("tbody tr")
    assert rows.count() == len(ranked["options"])
    assert shown(page)[0] == ranked["best"]["layout"]
    for at in (0, 1):
        page.one(f"compare-{at}").press("Space")
    text = page.text("comparison")
    for at in (0, 1):
        assert f"{ranked['options'][at]['memory_bytes'] / 1e9:.2f}" in text
        assert all(name in text for name, size in ranked["options"][at]["memory_by_component"].items() if size > 0)


def test_a_new_question_has_no_rows_of_the_old_one(window: Opening) -> None:
    page = window("plan?model=llama3.2-1b&cluster=2xH100&batch=64&seq=8192")
    assert page.one("ranking").count() == 1
    page.page.route("**/api/plan/search*", lambda route: None)  # it stays without an answer
    page.page.evaluate("hash => { location.hash = hash }", address(EXPERTS))
    page.page.wait_for_function(
        "() => document.querySelector('[data-testid=search-status]').textContent.includes('searching')"
    )
    assert page.page.locator("[data-testid=ranking-card] button").count() == 0


def test_a_page_that_opens_searches_and_judges_nothing_yet(chrome: Any, server: Server) -> None:
    """The first layout is nobody's choice: whether it fits is no answer to whether the model does."""
    found = Window(chrome.new_page())
    kept: list[Any] = []
    found.page.route("**/api/plan/search*", lambda route: kept.append(route))
    found.page.goto(f"http://127.0.0.1:{server.port}/#token={TOKEN}")
    found.page.wait_for_selector('[data-testid="searching"]')
    assert "Searching for the best layout of llama3-70b on 64 GPUs" in found.text("searching")
    assert found.one("verdict").locator(".bad, .good").count() == found.one("fits").count() == 0
    found.page.wait_for_timeout(100)
    assert len(kept) == 1
    kept.pop().continue_()
    found.page.wait_for_selector('[data-testid="fits"]')
    assert found.text("fits").startswith("It fits: ")
    assert found.one("searching").count() == 0
    found.page.close()


LABELS = """() => [...document.querySelectorAll("svg text")].filter(text => {
  const mine = text.getBoundingClientRect(), whole = text.ownerSVGElement.getBoundingClientRect();
  return mine.width && (mine.left < whole.left - 1 || mine.right > whole.right + 1);
}).map(text => text.textContent)"""


@pytest.mark.parametrize("width", [1400, 390])
def test_a_layout_that_is_far_from_fitting_has_whole_labels_and_no_utilisation(window: Opening, width: int) -> None:
    page = window(address(("plan", "llama3-8b", "8xH100", "tp=8", 64, 8192)), width=width)
    assert page.page.evaluate(LABELS) == []
    assert page.text("mfu") == "—"
    assert "on a device with more memory" in page.text("mfu-range")
    advice = page.text("advice")
    assert "it does not fit" in advice
    assert "--" not in advice
    assert page.wrong == []


def test_neighbours_of_an_earlier_question_are_gone_as_soon_as_it_changes(window: Opening) -> None:
    page = window(address(("plan", "llama3-8b", "8xH100", "tp=8", 64, 8192)))
    assert page.one("neighbours-table").count() == 1
    held: list[Any] = []
    page.page.route("**/api/**", lambda one: held.append(one))  # no answer comes
    page.one("slider-microbatches").press("ArrowRight")
    assert page.one("neighbours-table").count() == 0
    assert not page.one("advice").is_visible()
    for one in held:
        one.continue_()
    page.page.unroute("**/api/**")
    page.settle()
    assert page.one("neighbours-table").count() == 1
