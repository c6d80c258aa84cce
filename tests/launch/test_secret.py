"""The secret of a run is made once, read by its user alone, and never done without."""

import os
import re
import stat
import threading
from pathlib import Path

import pytest

from fivefold.launch.rendezvous import run_secret
from tests.refusals import refusal


def test_ranks_that_come_at_once_make_one_secret(tmp_path: Path) -> None:
    found: list[bytes] = []
    ranks = [threading.Thread(target=lambda: found.append(run_secret(tmp_path / "runs", {}))) for _ in range(16)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    (file,) = (tmp_path / "runs").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run_secret(tmp_path / "another", {}) != found[0]


def test_the_environment_comes_first(tmp_path: Path) -> None:
    assert run_secret(tmp_path, {"FIVEFOLD_SECRET": "sixteen letters."}) == b"sixteen letters."
    assert not list(tmp_path.iterdir())


def test_it_may_have_any_bytes(tmp_path: Path) -> None:
    assert run_secret(tmp_path, {"FIVEFOLD_SECRET": os.fsdecode(b"\xff" * 18)}) == b"\xff" * 18


@pytest.mark.parametrize("given", ["", "short"])
def test_a_short_one_is_refused(tmp_path: Path, given: str) -> None:
    assert refusal(lambda: run_secret(tmp_path, {"FIVEFOLD_SECRET": given})).codes == ["secret.short"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_one_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    run_secret(tmp_path, {})
    (tmp_path / ".secret").chmod(mode)
    refused(tmp_path, f"is open to other users: its mode is {mode:o}, not 600")


def refused(directory: Path, why: str) -> None:
    """With what to set instead."""
    error = refusal(lambda: run_secret(directory, {}))
    assert error.codes == ["secret.file"]
    assert re.search(rf"{why}.* or set FIVEFOLD_SECRET", str(error))


def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_secret(tmp_path, {})
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    refused(tmp_path, "and this process to 4242")


@pytest.mark.parametrize("content", ["", "\n", "short\n"])
def test_an_empty_one_does_not_switch_the_proof_off(tmp_path: Path, content: str) -> None:
    path = tmp_path / ".secret"
    path.touch(0o600)
    path.write_text(content)
    refused(tmp_path, "cannot be trusted to keep a secret: it holds . characters")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("x" * 64)
    makers = {"link": lambda path: path.symlink_to(tmp_path / "elsewhere"), "folder": Path.mkdir, "pipe": os.mkfifo}
    for name, make in makers.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / ".secret")
        refused(tmp_path / name, "cannot be read|is not a regular file")
    refused(tmp_path / "elsewhere" / "runs", "a directory that all machines share,")
