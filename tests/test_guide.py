"""Every line that the guide quotes is printed by the command above it; spaces between columns do not count.

And what the page of clusters says was run is what the last transcript says."""

import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.support.errors import UserError

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide.md"


def words(line: str) -> str:
    return " ".join(line.split())


def quoted() -> dict[str, list[str]]:
    """By command, the lines below it."""
    found: dict[str, list[str]] = {}
    for block in re.findall(r"```\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ fivefold "):
                lines = found.setdefault(line.removeprefix("$ fivefold "), [])
            else:
                lines.append(words(line))
    return found


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


def large(command: str) -> bool:
    """Searches of 64 GPUs and more take as long as all other commands together; but a fixed layout is quick. The README
    quotes one of them, and tests/test_readme.py runs it."""
    nodes = re.search(r"--cluster (\d+)x8xH100", command)
    return nodes is not None and int(nodes[1]) >= 8 and "--fix" not in command


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=[pytest.mark.slow] * large(one), id=one) for one in quoted()]
)
def test_the_guide_quotes_what_is_printed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # a line for each row and each sentence
    result = CliRunner().invoke(app, shlex.split(command))
    printed = [words(line) for line in result.output.splitlines()]
    if isinstance(result.exception, UserError):
        printed = [words(f"error: {problem}") for problem in result.exception.problems]
    else:
        assert result.exit_code == 0, result.output
    lines = quoted()[command]
    assert lines
    assert [line for line in lines if line not in printed] == []


def test_the_page_of_clusters_quotes_the_last_transcript() -> None:
    kept = (ROOT / "proofs" / "cluster.txt").read_text()
    passed = re.findall(r"^tests/cluster/(\w+)\.py::(\w+)(?:\[(\w+).*\])? PASSED", kept, re.MULTILINE)
    tests = [f"{file}: {name}{f'[{case}]' if case else ''}" for file, name, case in passed]
    [end] = re.findall(r"^=+ (.+) =+$", kept, re.MULTILINE)[-1:]
    assert len(tests) == int(end.split()[0])
    assert "\n".join(["```", *tests, end, "```"]) in (ROOT / "docs" / "clusters.md").read_text()
