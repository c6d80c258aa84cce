"""The documentation's site in a Chromium, from the disk and without a network: make docs-test builds it first."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).parents[2] / "build" / "site"
# But those without the site's frame: views, and the page that a server shows for a wrong address.
FRAMED = [path for path in SITE.rglob("*.html") if path.parent.name != "widgets" and path.name != "404.html"]
PAGES = sorted(path.relative_to(SITE).as_posix() for path in FRAMED)
WIDGETS = [page for page in PAGES if 'figure class="widget"' in (SITE / page).read_text()]
FOUND = ".md-search-result__item a"

pytestmark = pytest.mark.skipif(not PAGES, reason="there is no site in build/site; make docs builds it")
if not PAGES:
    PAGES = WIDGETS = ["index.html"]  # a name for the test that is skipped


class Seen:
    """A page, with what its console complained about and what it asked for."""

    def __init__(self, page: Any):
        self.page, self.wrong, self.asked = page, list[str](), list[str]()
        page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def open(self, name: str) -> None:
        self.page.goto(f"file://{SITE / name}")
        self.page.wait_for_function("() => document.documentElement.classList.contains('js')")

    @property
    def outside(self) -> list[str]:
        return [address for address in self.asked if not address.startswith(("file:", "data:", "blob:", "about:"))]

    @property
    def frame(self) -> Any:
        """The first view of the page."""
        self.page.locator("figure.widget iframe").first.scroll_into_view_if_needed()
        return self.page.frame_locator("figure.widget iframe").first


@pytest.fixture
def opened(chrome: Any) -> Iterator[Callable[..., Seen]]:
    contexts: list[Any] = []

    def opening(width: int = 1280, *, dark: bool = False) -> Seen:
        size = {"width": width, "height": 844 if width < 600 else 900}
        contexts.append(chrome.new_context(viewport=size, color_scheme="dark" if dark else "light", offline=True))
        return Seen(contexts[-1].new_page())

    yield opening
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_every_page_fits_its_window_and_asks_nobody(opened: Callable[..., Seen], width: int, dark: bool) -> None:
    seen = opened(width, dark=dark)
    wide = []
    for name in PAGES:
        seen.open(name)
        if seen.page.evaluate("() => document.documentElement.scrollWidth > innerWidth"):
            wide.append(name)
        scheme = seen.page.evaluate("() => document.body.dataset.mdColorScheme")
        assert scheme == ("slate" if dark else "default"), name
    assert (wide, seen.wrong, seen.outside) == ([], [], [])


@pytest.mark.parametrize("words", ["zero bubble", "layout.microbatches", "reduce-scatter", "verify_adapter"])
def test_search_finds(opened: Callable[..., Seen], words: str) -> None:
    seen = opened()
    seen.open("index.html")
    seen.page.click("input.md-search__input")
    seen.page.keyboard.type(words)
    seen.page.wait_for_selector(FOUND)
    found = seen.page.locator(FOUND)
    targets = [found.nth(at).get_attribute("href").partition("?")[0] for at in range(found.count())]
    assert [one for one in targets if not Path(one.removeprefix("file://")).is_file()] == []
    marked = {text.lower() for text in seen.page.locator(f"{FOUND} mark").all_inner_texts()}
    assert any(words.split()[0].startswith(text) for text in marked), marked
    assert (seen.wrong, seen.outside) == ([], [])


FIRST = {
    "zero 3": "learn/data-parallel.html",
    "zero=3": "learn/data-parallel.html",
    "bubble": "learn/pipeline.html",
    "kv heads": "learn/tensor.html",
    "checkpoint": "checkpoints.html",
    "lr": "jobs.html",
}


@pytest.mark.parametrize("words", FIRST)
def test_search_finds_the_page_that_explains_it_first(opened: Callable[..., Seen], words: str) -> None:
    seen = opened()
    seen.open("index.html")
    seen.page.click("input.md-search__input")
    seen.page.keyboard.type(words)
    seen.page.wait_for_function(f"() => document.querySelector('{FOUND}')?.href.includes('/{FIRST[words]}')")


def test_no_formula_is_cut_in_a_narrow_window(opened: Callable[..., Seen]) -> None:
    """One that is wider than the window scrolls; none is higher than the box that it scrolls in."""
    seen = opened(420)
    boxes = "() => [...document.querySelectorAll('.formula')].map(e => [e.scrollHeight, e.clientHeight])"
    wide = "() => [...document.querySelectorAll('.formula')].filter(e => e.scrollWidth > e.clientWidth).length"
    seen.open("learn/tensor.html")
    assert seen.page.evaluate(wide) > 0  # else this window is no narrow one
    for name in [name for name in PAGES if name.startswith("learn/")]:
        seen.open(name)
        high = [box for box in seen.page.evaluate(boxes) if box[0] > box[1]]
        assert high == [], name


@pytest.mark.parametrize("name", WIDGETS)
def test_a_view_in_a_page_is_drawn(opened: Callable[..., Seen], name: str) -> None:
    seen = opened(390, dark=True)
    seen.open(name)
    assert seen.frame.locator("main .view").first.inner_text()
    seen.page.wait_for_function("() => Number(document.querySelector('figure.widget iframe').height) !== 640")
    inner = seen.frame.locator("html")
    assert inner.evaluate("root => root.scrollWidth <= root.clientWidth")
    assert inner.evaluate("root => root.dataset.theme") == "dark"
    assert (seen.wrong, seen.outside) == ([], [])


def test_a_view_in_a_page_can_be_played(opened: Callable[..., Seen]) -> None:
    """Makespans are those of `fivefold compare schedules --pp 4 --microbatches 8`, and with 16."""
    seen = opened()
    seen.open("index.html")
    frame = seen.frame
    makespan = frame.locator('[data-testid="makespan"]')

    def says(text: str) -> None:
        frame.locator(f'[data-testid="makespan"]:text-is("{text}")').wait_for()

    says("25.5")
    frame.locator('[data-testid="select-schedule"]').select_option("1f1b")
    says("33")
    frame.locator('[data-testid="slider-microbatches"]').press("ArrowRight")
    says("57")
    frame.locator('[data-testid="take-zb-h1"]').click()
    says("51")
    assert makespan.count() == 1
    seen.page.evaluate("() => document.body.dataset.mdColorScheme = 'slate'")
    frame.locator(':root[data-theme="dark"]').wait_for()
    assert (seen.wrong, seen.outside) == ([], [])


def test_a_plan_in_a_page_shows_the_layout_that_is_tried(opened: Callable[..., Seen]) -> None:
    seen = opened()
    seen.open("start.html")
    frame = seen.frame
    tried = frame.get_by_role("button", name="Try pp=2")
    before = frame.locator('[data-testid="step"]').inner_text()
    tried.click()
    frame.get_by_role("button", name="Try pp=1").wait_for()  # the way back
    assert frame.locator('[data-testid="step"]').inner_text() != before
    assert (seen.wrong, seen.outside) == ([], [])
