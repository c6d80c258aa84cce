"""The documentation's Markdown: its links lead somewhere, its commands can be typed, and each page has its place."""

import json
import re
from typing import Any

import pytest
import typer
import yaml
from website.nav import in_order
from website.notebook import notebook
from website.pages import (
    ROOT,
    anchors,
    commands,
    commands_in,
    is_outside,
    links,
    prose,
    read,
    repository_path,
    site_path,
    sources,
)
from website.widgets import widget_of, widgets

from fivefold.cli import app

PAGES = sources()
# Commands that a recipe of its own page adds before it calls them.
ADDED = {"CONTRIBUTING.md": ["list flops"]}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_anchor_of_a_page_exists(page: str) -> None:
    for link in links(read(page)):
        if is_outside(link.target):
            continue
        path, anchor = repository_path(page, link.target), link.target.partition("#")[2]
        assert (ROOT / path).exists(), f"{page}: {link.target}"
        assert not anchor or anchor in anchors(read(path)), f"{page}: {link.target}"


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_is_closed(page: str) -> None:
    """Else commands and links would be looked for in the wrong half of a page."""
    assert not re.findall(r"^ *```", prose(read(page)), re.M)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_can_be_typed(page: str) -> None:
    """As the command line itself reads it, without running it; and every widget's is one that makes a page."""
    for words in commands(read(page)):
        if not any(" ".join(words).startswith(one) for one in ADDED.get(page, [])):
            parsed(words)
    for widget in widgets(read(page)):
        parsed([*widget.words, "--html", "view.html"])


def parsed(words: list[str]) -> dict[str, Any]:
    """The arguments of a command, read by the parser of the command line."""
    command, rest, name = typer.main.get_command(app), list(words), "fivefold"
    while inside := getattr(command, "commands", {}):
        if not rest and command.invoke_without_command:
            return {}
        name = rest.pop(0)
        assert name in inside, f"there is no command {' '.join(words)}"
        command = inside[name]
    return dict(command.make_context(name, rest).params)


@pytest.mark.parametrize("words", ["plan", "plan llama3-8b --clusters 8xH100", "draw 1f1b --pp four", "lab begin"])
def test_what_cannot_be_typed_is_found(words: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        parsed(words.split())


def test_every_page_has_its_place_in_the_navigation() -> None:
    """A page of docs/ stands in mkdocs.yml, or is a chapter that the index of its folder names."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = in_order(settings["nav"])
    assert len(named) == len(set(named))
    pages = {site_path(page) for page in PAGES}
    assert pages - set(named) == set(), "add them to nav in mkdocs.yml"
    assert {one for one in named if not one.startswith("reference/")} - pages == set()


BLOCK = """
$ fivefold plan llama3-8b --cluster 8xH100   # a comment
error: fivefold plan is only printed here
fivefold train job.toml \\
    layout="dp=2,tp=2" && fivefold train runs/job
fivefold verify --all --json > sweep.json; fivefold verify sweep.json 2>&1 | grep fivefold
"""


def test_a_block_is_read_as_a_shell_reads_it() -> None:
    assert commands_in(BLOCK) == [
        ["plan", "llama3-8b", "--cluster", "8xH100"],
        ["train", "job.toml", "layout=dp=2,tp=2"],
        ["train", "runs/job"],
        ["verify", "--all", "--json"],
        ["verify", "sweep.json"],
    ]


PAGE = """# The first: a page's `name`

[one](other.md#there) and `[no](link.md)`, ![a picture](a.svg), [`code`](#again-1).

```
[none](here.md)   # no heading
```

## Again
## Again
"""


def test_links_and_anchors_are_those_that_github_sees() -> None:
    assert [link.target for link in links(PAGE)] == ["other.md#there", "a.svg", "#again-1"]
    assert anchors(PAGE) == {"the-first-a-pages-name", "again", "again-1"}
    assert len(prose(PAGE)) == len(PAGE)
    assert "none" not in prose(PAGE)
    assert "no heading" not in prose(PAGE)


def test_where_the_site_has_a_file() -> None:
    assert site_path("docs/planner.md") == "planner.md"
    assert site_path("README.md") == "project/readme.md"
    assert site_path("docs/pictures/mesh.svg") == "pictures/mesh.svg"
    assert site_path("recipes") == "files/recipes/index.md"
    assert site_path("examples/plugins/lion/fivefold_lion.py") == "files/examples/plugins/lion/fivefold_lion.py.md"
    assert repository_path("docs/plugins.md", "../examples/plugins/lion") == "examples/plugins/lion"


def test_a_widget_is_a_command_that_needs_no_ranks() -> None:
    widget = widget_of("plan llama3-8b --cluster 8xH100 --view mesh")
    assert (widget.command, widget.view) == ("fivefold plan llama3-8b --cluster 8xH100", "mesh")
    assert re.fullmatch(r"widgets/plan-\w{12}\.html", widget.file)
    assert widget.file == widget_of("plan llama3-8b --cluster 8xH100").file
    with pytest.raises(ValueError, match="made by draw or plan"):
        widget_of("verify --layout dp=2")


def test_a_notebook_is_shown_with_what_its_cells_gave() -> None:
    drawn = {"image/svg+xml": ["<svg/>"], "text/plain": ["x"]}
    outputs = [{"text": ["1\n"]}, {"data": {"text/plain": ["two"]}}, {"data": drawn}]
    text = {"cell_type": "markdown", "source": ["# A\n", "text"]}
    cells = [text, {"cell_type": "code", "source": ["f()"], "outputs": outputs}]
    fence = "`" * 8
    shown = [f"{fence}python\nf()\n{fence}", f"{fence}text\n1\n{fence}", f"{fence}text\ntwo\n{fence}"]
    picture = '<img alt="what the cell above draws" src="data:image/svg+xml;base64,PHN2Zy8+">'
    assert notebook(json.dumps({"cells": cells})) == "\n\n".join(["# A\ntext", *shown, picture]) + "\n"
