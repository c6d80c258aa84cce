"""Every line that the guide and the first page quote is printed by the command above it, but for spaces.

And what the page of clusters says was run is what the last transcript says."""

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.guides import large, printed, quoted

ROOT = Path(__file__).parents[1]


LINES = quoted(ROOT / "docs" / "guide.md") | quoted(ROOT / "docs" / "start.md")


@pytest.fixture(scope="module", autouse=True)
def searched_once() -> Iterator[None]:
    """A space that several commands search, to show the best beside a layout of one's own, is computed once."""
    wishes: dict[str, object] = {}
    module = importlib.import_module("fivefold.planner.search")
    space = vars(module)["space"]
    with pytest.MonkeyPatch.context() as patch:
        found = cache(lambda told: space(wishes[told]))
        patch.setattr(module, "space", lambda wish: (wishes.setdefault(repr(wish), wish), found(repr(wish)))[1])
        yield


@pytest.mark.parametrize("command", [pytest.param(one, marks=[pytest.mark.slow] * large(one), id=one) for one in LINES])
def test_the_guide_quotes_what_is_printed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = printed(command, 400, monkeypatch)  # so wide that each row and each sentence has a line
    assert LINES[command]
    assert [line for line in LINES[command] if line not in found] == []


def test_the_page_of_clusters_quotes_the_last_transcript() -> None:
    kept = (ROOT / "proofs" / "cluster.txt").read_text()
    passed = re.findall(r"^tests/cluster/(\w+)\.py::(\w+)(?:\[(\w+).*\])? PASSED", kept, re.MULTILINE)
    tests = [f"{file}: {name}{f'[{case}]' if case else ''}" for file, name, case in passed]
    [end] = re.findall(r"^=+ (.+) =+$", kept, re.MULTILINE)[-1:]
    assert len(tests) == int(end.split()[0])
    assert "\n".join(["```", *tests, end, "```"]) in (ROOT / "docs" / "clusters.md").read_text()
