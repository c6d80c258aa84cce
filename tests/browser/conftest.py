"""A Chromium, a server of `fivefold ui`, and windows that note what their console says and what they ask for."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.window import Window
from tests.web.a_run import a_run
from tests.web.serving import TOKEN, Server, serving

FOREIGN = "elsewhere.example"  # a name that resolves to this machine, as a page of DNS rebinding has it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")


@pytest.fixture(scope="session")
def chrome() -> Iterator[Any]:
    if importlib.util.find_spec("playwright") is None:
        pytest.skip('there is no playwright: pip install "fivefold[browser-test]"')
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("there is no chromium: apt-get install chromium, or name one in CHROMIUM")
    from playwright.sync_api import sync_playwright

    words = ["--no-sandbox", f"--host-resolver-rules=MAP {FOREIGN} 127.0.0.1"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=words)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Directories that the server may read: one run, with experts and a trace."""
    folder = tmp_path_factory.mktemp("runs")
    a_run(folder / "demo", experts=True, traced=True)
    return (folder,)


@pytest.fixture(scope="session")
def server(runs: tuple[Path, ...]) -> Iterator[Server]:
    with serving(runs) as found:
        yield found


@pytest.fixture
def window(chrome: Any, server: Server) -> Iterator[Callable[..., Window]]:
    """window("plan?model=tiny", width=390, dark=True): the served page at a view; window(file=path): a file."""
    opened: list[Any] = []

    def opening(
        view: str = "", *, file: Path | None = None, width: int = 1280, dark: bool = False, still: bool = False
    ) -> Window:
        size, scheme = {"width": width, "height": 844 if width < 600 else 900}, "dark" if dark else "light"
        context = chrome.new_context(
            viewport=size, color_scheme=scheme, reduced_motion="reduce" if still else "no-preference",
            offline=file is not None,
        )  # fmt: skip
        opened.append(context)
        found = Window(context.new_page())
        if file is not None:
            found.page.goto(f"file://{file}")
        else:
            found.page.goto(f"http://127.0.0.1:{server.port}/#token={TOKEN}")
            found.page.wait_for_selector("#tabs a")
            found.page.evaluate("hash => { location.hash = hash }", view)
            found.page.wait_for_selector(f'[data-testid="view-{view.partition("?")[0]}"]')
        found.settle()
        return found

    yield opening
    for context in opened:
        context.close()
