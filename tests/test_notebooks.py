"""The notebooks are kept with what their cells show. Those that need no ranks are run here, without Jupyter; all of
them in its kernel by `make notebooks-test`."""

import ast
import contextlib
import importlib
import io
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tools.notebooks import stable

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FIRST = 7  # cells of the plan that search one cluster; those after it search larger ones


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["plan", "schedules", "verify"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_from_top_to_bottom_and_no_cell_failed(path: Path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert not re.search(r"/tmp/|/home/|/work/", path.read_text())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_links_to_is_there(path: Path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    assert links
    assert [link for link in links if not (FOLDER / link).exists()] == []


@pytest.fixture
def searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A space that several cells search is computed once."""
    wishes: dict[str, Any] = {}
    module = importlib.import_module("fivefold.planner.search")
    space = vars(module)["space"]
    found = cache(lambda told: space(wishes[told]))
    monkeypatch.setattr(module, "space", lambda wish: (wishes.setdefault(repr(wish), wish), found(repr(wish)))[1])


@pytest.mark.parametrize(
    ("name", "count"), [("schedules", None), ("plan", FIRST), pytest.param("plan", None, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("searched_once")
def test_cells_show_what_is_kept(name: str, count: int | None, tmp_path: Path) -> None:
    """What they print, tables as HTML and pictures; the plain text beside those is as wide as a terminal is."""
    known: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        for cell in cells(FOLDER / f"{name}.ipynb", "code")[:count]:
            shown = list(outputs("".join(cell["source"]), known))
            assert [narrowed(one) for one in stable(shown)] == [narrowed(one) for one in stable(cell["outputs"])]


def outputs(source: str, known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a cell shows: what it prints, and the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), known)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), known) if last is not None else None
    if printed.getvalue():
        yield {"output_type": "stream", "name": "stdout", "text": printed.getvalue()}
    if value is not None:
        svg = getattr(value, "_repr_svg_", None)
        data = {"image/svg+xml": svg()} if svg else value._repr_mimebundle_()
        yield {"output_type": "execute_result", "data": data}


def narrowed(texts: dict[str, str]) -> dict[str, str]:
    return {kind: text for kind, text in texts.items() if kind != "text/plain"}
