"""Ranks compare a digest of their plugins: of all files that are theirs, and of none that is not."""

from pathlib import Path

import pytest

from fivefold.support import plugins
from fivefold.support.plugin_files import source_files

OWN = """
from os import path
import json, helper as other
from package.part import thing

def late():
    from deep import name
"""


FILES = {
    "mine.py": OWN,
    "helper.py": "from deeper import x\n",
    "deeper.py": "x = 1\n",
    "deep.py": "name = 1\n",
    "package/__init__.py": "",
    "package/part.py": "thing = 1\n",
    "stranger.py": "1 / 0\n",
}


def loaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files of the plugin `mine`, which is loaded from there."""
    (home / "package").mkdir(parents=True)
    for name, text in FILES.items():
        (home / name).write_text(text)
    monkeypatch.syspath_prepend(str(home))
    plugins._imported.clear()
    plugins.load("mine:late")
    return {str(path.relative_to(home)) for _, path in source_files("mine")}


def test_helpers_beside_a_file_are_its_own_and_what_it_does_not_import_is_not(
    tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "work"
    own = loaded(home, monkeypatch)
    assert own == FILES.keys() - {"stranger.py"}
    before = plugins.digest()
    (home / "stranger.py").write_text("2 / 0\n")
    assert plugins.digest() == before
    for name in own:
        (home / name).write_text((home / name).read_text() + "# changed\n")
        assert plugins.digest() != before
        before = plugins.digest()


def test_beside_an_installed_module_nothing_is_its_own(
    tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded(tmp_path / "site-packages", monkeypatch) == {"mine.py"}
