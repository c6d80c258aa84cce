"""The Run view in a browser: figures of the run's files, new ones as they come, and all of it readable."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fivefold.trainer.records import to_line
from fivefold.trainer.result import TrainResult
from tests.browser.test_views import LOOKED_AT
from tests.browser.window import Window
from tests.web.a_run import a_run, step
from tests.web.serving import TOKEN, Server, serving


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    a_run(folder / "dense", traced=True)
    a_run(folder / "moe", experts=True)
    return folder


@pytest.fixture(scope="module")
def given(runs: Path) -> Iterator[Server]:
    with serving((runs,)) as found:
        yield found


def opened(chrome: Any, server: Server, width: int = 1280, dark: bool = False) -> Window:
    scheme = "dark" if dark else "light"
    context = chrome.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found = Window(context.new_page())
    found.page.goto(f"http://127.0.0.1:{server.port}/#token={TOKEN}")
    found.page.wait_for_selector("#tabs a")
    found.page.evaluate("location.hash = 'run?runs=dense,moe'")
    found.page.wait_for_selector('[data-testid="trace-plot"] svg')
    return found


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_two_runs_are_sound_to_look_at(chrome: Any, given: Server, width: int, dark: bool) -> None:
    found = opened(chrome, given, width, dark)
    assert found.audit(*LOOKED_AT) == {}
    fills = found.page.evaluate(
        "() => [...document.querySelectorAll('[data-testid=trace-card] .legend rect')].map(one => one.outerHTML)"
    )
    assert len(set(fills)) == len(fills) > 3  # an axis does not look like an action
    assert found.wrong == []
    found.page.context.close()


def test_the_page_follows_a_run(chrome: Any, given: Server, runs: Path) -> None:
    found = opened(chrome, given)
    line = found.one("latest").locator("tbody tr").first

    def cells() -> list[str]:
        return [text.strip() for text in line.locator("td").all_inner_texts()]

    last = TrainResult.read(runs / "dense").steps[-1]
    assert cells()[:3] == ["dense", f"{last.step} of 40", f"{last.loss:.4f}"]
    with (runs / "dense/metrics.jsonl").open("ab") as file:
        file.write(to_line(step(last.step + 1)) + b"damaged\n")
    found.page.wait_for_function(f"() => document.body.innerText.includes('{last.step + 1} of 40')")
    assert cells()[2] == f"{step(last.step + 1).loss:.4f}"
    assert cells()[-1] == "1"
    found.one("run-moe").uncheck()
    found.page.wait_for_function("() => document.querySelectorAll('[data-testid=latest] tbody tr').length === 1")
    assert "runs=dense" in found.page.url
    assert found.wrong == []
    found.page.context.close()
