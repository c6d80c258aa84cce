"""CONTRIBUTING.md's recipes have the form that `make contributing` follows, and stay within their promises."""

from pathlib import Path

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


def test_every_page_that_is_named_exists() -> None:
    for name in ("ARCHITECTURE.md", "CHANGELOG.md", "proofs/README.md"):
        assert f"]({name})" in GUIDE.read_text()
        assert (ROOT / name).is_file()
