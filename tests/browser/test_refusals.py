"""Who is refused, tried in a browser: a foreign name for this machine, another token, a page of another origin."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import FOREIGN
from tests.browser.window import Window
from tests.web.serving import TOKEN, Server

ASK = """async ({ port, token }) => {
  try {
    const headers = { Authorization: `Bearer ${token}` };
    return (await fetch(`http://127.0.0.1:${port}/api/plan?model=tiny`, { headers })).status;
  } catch (error) {
    return String(error);
  }
}"""


def test_another_token_is_refused_with_a_sentence(chrome: Any, server: Server) -> None:
    page = chrome.new_page()
    for hash in ("#token=another-token", ""):
        page.goto("about:blank")
        page.goto(f"http://127.0.0.1:{server.port}/{hash}")
        notice = page.wait_for_selector('[data-testid="notice"]')
        assert "open the address that `fivefold ui` printed" in notice.inner_text()
        assert page.query_selector("#tabs a") is None
    page.close()


def test_a_foreign_name_for_this_machine_gets_nothing(chrome: Any, server: Server) -> None:
    """As a page has it whose name is made to resolve to 127.0.0.1: the browser sends that name as the Host."""
    page = chrome.new_page()
    for path in ("", "app.js", "api"):
        answer = page.goto(f"http://{FOREIGN}:{server.port}/{path}")
        assert answer.status == 403
        assert "own address only" in answer.text()
    page.close()


def test_a_page_of_another_origin_gets_nothing_even_with_the_token(chrome: Any, server: Server) -> None:
    page = chrome.new_page()
    page.goto("data:text/html,<p>another origin")
    assert "Failed to fetch" in str(page.evaluate(ASK, {"port": server.port, "token": TOKEN}))
    page.close()


def test_the_token_leaves_the_address_and_stays_out_of_requests(window: Callable[..., Window], server: Server) -> None:
    found = window("plan?model=tiny&cluster=2xCPU&batch=8&seq=64")
    assert TOKEN not in found.page.url
    assert not [address for address in found.asked if TOKEN in address]
    assert found.page.evaluate("() => document.cookie") == ""


def test_the_page_of_the_server_cannot_be_framed(chrome: Any, server: Server) -> None:
    page = chrome.new_page()
    page.set_content(f'<iframe src="http://127.0.0.1:{server.port}/"></iframe>')
    page.wait_for_timeout(1500)
    assert all("Fivefold" not in frame.content() for frame in page.frames[1:])
    page.close()


@pytest.mark.parametrize(
    ("address", "notice", "said", "control"),
    [
        ("plan?cluster=8xNOPE", "question-error", "unknown accelerator 'NOPE'", "select-model"),
        ("mesh?rank=99999", "notice-mesh", "99999", "select-model"),
        ("schedule?pp=abc", "refused", "pp='abc' is not a whole number", "slider-pp"),
        ("run?runs=nowhere", "run-problem", "there is no run 'nowhere'", "run-demo"),
    ],
)
def test_a_bad_first_address_has_its_sentence_and_the_defaults_below_it(
    window: Callable[..., Window], address: str, notice: str, said: str, control: str
) -> None:
    found = window(address)
    assert said in found.text(notice)
    assert "Shown instead" in found.text(notice)
    assert found.one(control).is_enabled()
    assert found.page.url.endswith(f"#{address}")  # the user's own, until something is chosen
    assert not re.search(r"[.?!]\.", found.text(notice))
    if control != "run-demo":
        found.one("slider-pp").press("ArrowRight")
        found.settle()
        assert not found.page.url.endswith(f"#{address}")
        assert not found.one(notice).is_visible()
    assert all("400" in wrong for wrong in found.wrong)


@pytest.mark.parametrize(
    ("good", "bad", "notice"),
    [
        ("plan?model=tiny&cluster=2xCPU&batch=8&seq=64", "plan?model=nothing", "question-error"),
        ("mesh?model=tiny&cluster=2xCPU&batch=8&seq=64&layout=dp=2", "mesh?model=nothing", "notice-mesh"),
        ("schedule?schedule=gpipe&pp=4&microbatches=8", "schedule?schedule=nothing", "refused"),
        ("run?runs=demo", "run?runs=nothing", "run-problem"),
    ],
)
def test_a_bad_later_address_takes_the_answer_of_the_one_before_away(
    window: Callable[..., Window], good: str, bad: str, notice: str
) -> None:
    found, first = window(good), window(bad)
    found.page.evaluate("hash => { location.hash = hash }", bad)
    found.settle()
    for one in (found, first):
        assert "'nothing'" in one.text(notice)
        assert "Shown instead" in one.text(notice)
    assert found.page.locator("main").inner_text() == first.page.locator("main").inner_text()


def test_a_question_without_an_answer_has_no_figures_of_another(window: Callable[..., Window]) -> None:
    found = window("plan?model=tiny&cluster=2xCPU&batch=8&seq=64")
    batch = found.one("number-batch")
    batch.fill("0")
    batch.press("Tab")
    found.settle()
    assert "batch" in found.text("question-error")
    for shown in ("verdict", "step", "memory-card", "ranking-card", "neighbours-table"):
        assert not found.one(shown).is_visible()
    batch.fill("8")
    batch.press("Tab")
    found.settle()
    for shown in ("fits", "step", "memory-card", "ranking", "neighbours-table"):
        assert found.one(shown).is_visible()
    assert not found.one("question-error").is_visible()


def test_an_emptied_number_is_named(window: Callable[..., Window]) -> None:
    found = window("plan?model=tiny&cluster=2xCPU&batch=8&seq=64")
    nodes = found.one("number-nodes")
    nodes.fill("")
    nodes.press("Tab")
    assert "Nodes is empty" in found.text("question-error")
    nodes.fill("1")
    nodes.press("Tab")
    found.settle()
    assert not found.one("question-error").is_visible()
