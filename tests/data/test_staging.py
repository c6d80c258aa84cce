"""A directory of tokens appears complete or not at all, and nothing that is not ours is replaced."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.data.prepare import prepare, staging_directory
from fivefold.data.tokens import TokenStore
from tests.refusals import refusal

Jsonl = Callable[..., Path]


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, jsonl: Jsonl) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    path = jsonl({"text": "x"})
    with pytest.raises(KeyboardInterrupt):
        prepare([path], tmp_path / "out", progress=interrupt)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path: Path, jsonl: Jsonl) -> None:
    path = jsonl({"text": "x"})
    code = (
        "import os, sys, pathlib; from fivefold.data.prepare import prepare\n"
        "prepare([pathlib.Path(sys.argv[1])], pathlib.Path(sys.argv[2]), progress=lambda *_: os._exit(9))"
    )
    assert subprocess.run([sys.executable, "-c", code, path, tmp_path / "out"], check=False).returncode == 9
    (left,) = set(tmp_path.iterdir()) - {path}
    assert left.name.endswith(".partial")
    assert not (left / "index.json").exists()
    assert refusal(lambda: TokenStore.open(tmp_path / "out")).codes == ["data.index.missing"]
    (tmp_path / ".out-2.0123abcd.partial").mkdir()  # of another name
    prepare([path], tmp_path / "out")
    assert TokenStore.open(tmp_path / "out").split("train").tokens == 2
    # The next one has removed what was left, and left nothing itself.
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "out", ".out-2.0123abcd.partial"}
    assert "claim" not in os.listdir(tmp_path / "out")


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path, jsonl: Jsonl) -> None:
    path, out = jsonl({"text": "x"}), tmp_path / "out"
    with staging_directory(out, overwrite=True) as directory:
        (directory / "index.json").write_text("mine")
        prepare([path], out)
        assert (directory / "index.json").read_text() == "mine"


def test_tokens_that_were_replaced_are_removed_once_the_new_ones_are_there(tmp_path: Path, jsonl: Jsonl) -> None:
    path, old = jsonl({"text": "x"}), tmp_path / ".out.0123abcd.old"
    prepare([path], old)
    prepare([path], tmp_path / "out")
    assert old.exists()  # nothing stood in its place when this began: it may be all that there is
    prepare([path], tmp_path / "out", overwrite=True)
    assert not old.exists()


def test_only_prepared_tokens_are_overwritten_and_only_when_asked(tmp_path: Path, jsonl: Jsonl) -> None:
    path, out = jsonl({"text": "old"}), tmp_path / "out"
    out.mkdir()
    prepare([path], out)  # an empty directory is free
    assert "already holds prepared tokens" in str(refusal(lambda: prepare([path], out)))
    prepare([jsonl({"text": "new"})], out, overwrite=True)
    assert TokenStore.open(out).split("train").ids(0, 3).tolist() == list(b"new")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", path.name]

    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    assert refusal(lambda: prepare([path], tmp_path / "home", overwrite=True)).codes == ["output.taken"]
    assert (tmp_path / "home" / "thesis.txt").exists()
    assert refusal(lambda: prepare([path], path)).codes == ["output.taken"]


def test_a_second_run_does_not_read_the_tokens_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for _ in range(2):
        assert prepare([tmp_path], tmp_path / "out", overwrite=True).documents == 1


def test_a_full_disk_is_told_and_cleaned_up(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    (tmp_path / "big.txt").write_bytes(bytes(3 << 20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # the nearest thing to a full disk
    try:
        error = refusal(lambda: prepare([tmp_path / "big.txt"], tmp_path / "out"))
        assert (error.codes, "GB are free there" in str(error)) == (["file.write"], True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["big.txt"]
