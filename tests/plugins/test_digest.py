"""Ranks compare a digest of their plugins: of all files that are theirs, and of none that is not."""

import importlib
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from fivefold.support import plugins
from fivefold.support.plugin_files import installed_as, source_files
from tests.commands import start
from tests.plugins.conftest import HOMES

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


RECORD = """mine.py,sha256=aaa,10
data.json,sha256=bbb,3
../../bin/mine,sha256=ccc,200
mine-1.0.dist-info/direct_url.json,sha256=ddd,70
__pycache__/mine.cpython-311.pyc,,
"""


def test_of_what_is_installed_the_version_and_every_file_counts_that_is_alike_on_all_machines(
    tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "site-packages"
    digests = []
    for version, record in (
        ("1.0", RECORD),
        ("1.0", RECORD.replace("ccc", "xxx").replace("ddd", "yyy")),  # a script names its Python, and a note a folder
        ("1.0", RECORD.replace("bbb", "zzz")),
        ("1.1", RECORD.replace("mine-1.0", "mine-1.1")),
    ):
        if not home.exists():
            loaded(home, monkeypatch)
        for known in home.glob("mine-*"):
            (known / "RECORD").unlink()
            known.rmdir()
        (home / f"mine-{version}.dist-info").mkdir()
        (home / f"mine-{version}.dist-info" / "RECORD").write_text(record)
        installed_as.cache_clear()
        digests.append(plugins.digest())
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


def test_the_working_directory_has_the_plugin_and_its_helpers_and_nothing_else(
    tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is missing, asked for later, is not taken from there."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    plugins._imported.clear()
    late = plugins.load("mine:late")
    late()
    assert str(tmp_path) not in sys.path
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("stranger")


def test_a_rank_with_other_plugin_code_is_turned_away_before_the_first_step(tmp_path: Path) -> None:
    """Two ranks in two directories, each with a plugin of the same name, of which one line differs."""
    text = (HOMES / "lion" / "fivefold_lion.py").read_text()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    words = ["train", "optimizer.name=fivefold_lion:Lion", "layout=dp=2", f"run.dir={tmp_path / 'runs'}", "data.seq=16",
             "train.batch=2", "train.steps=1", "train.eval_samples=0", "train.device=cpu", "model.layers=1",
             "train.timeout=60"]  # fmt: skip
    with ExitStack() as ending:
        ranks = []
        for rank in range(2):
            home = tmp_path / f"node-{rank}"
            home.mkdir()
            (home / "fivefold_lion.py").write_text(text + rank * "# another version\n")
            place = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(ending.enter_context(start(*words, cwd=home, env=place)))
        for one in ranks:
            one.wait()
    said = "\n".join(one.stderr for one in ranks)
    assert all(one.returncode for one in ranks)
    assert "has other plugins: their files have digest" in said
    assert not [*tmp_path.glob("runs/*/metrics.jsonl")]
