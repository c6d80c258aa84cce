"""CONTRIBUTING.md's recipes have the form that `make contributing` follows, and stay within their promises."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tools.contributing import GUIDE, listed, sections

ROOT = Path(__file__).parent.parent
RECIPES = sections(GUIDE.read_text())


def test_every_recipe_has_files_steps_and_a_check() -> None:
    for title, body in RECIPES.items():
        assert listed(body), title
        assert "```diff\n" in body, title
        assert "```sh\n" in body, title
        for file in listed(body):
            new = f"+++ b/{file}"
            assert new in body, f"{title} lists {file} and does not change it"


@pytest.mark.skipif(not shutil.which("git"), reason="git applies the patches")
@pytest.mark.parametrize("title", RECIPES)
def test_what_a_recipe_changes_is_still_there(title: str) -> None:
    for patch in re.findall(r"^```diff\n(.*?)^```$", RECIPES[title], re.M | re.S):
        words = ["git", "apply", "--check", "--recount", "--unidiff-zero", "-"]
        done = subprocess.run(words, cwd=ROOT, input=patch, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_page_that_is_named_exists() -> None:
    for name in ("ARCHITECTURE.md", "CHANGELOG.md", "proofs/README.md"):
        assert f"]({name})" in GUIDE.read_text()
        assert (ROOT / name).is_file()
