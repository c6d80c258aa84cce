"""What a run writes beside its checkpoints: what cannot be written is said, and exit code 0 means that all is there."""

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.checkpoint.store import Store
from fivefold.job.listeners import TensorBoard
from fivefold.job.reading import read_job
from fivefold.support.errors import TrainingError
from fivefold.trainer import outputs, records
from fivefold.trainer import records as metrics
from fivefold.trainer.result import TrainResult
from tests.commands import fivefold, start
from tests.trainer.test_ends import TWO, saved, words


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _full_at_the_start() -> None:
    outputs.put = _no_room


@pytest.mark.parametrize("more", [[], TWO])
def test_a_disk_that_is_full_at_the_start_is_a_sentence(tokens: Path, tmp_path: Path, more: list[str]) -> None:
    done = fivefold(*words(tokens, *more), cwd=tmp_path, before=_full_at_the_start)
    assert done.returncode == 2
    assert re.fullmatch(r"error: cannot write runs/run: No space left on device; .* are free there\n", done.stderr)
    assert "step 1/" not in done.stdout


@pytest.fixture(scope="module")
def one_step(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    assert fivefold(*words(tokens, "train.steps=1"), cwd=folder).returncode == 0
    return folder / "runs"


@pytest.mark.parametrize("name", ["claim", "runs.json", "job.toml", "environment.json", "metrics.jsonl"])
def test_what_cannot_be_written_at_the_start_is_named(tokens: Path, tmp_path: Path, one_step: Path, name: str) -> None:
    """Here because a directory is in its place."""
    shutil.copytree(one_step, tmp_path / "runs", symlinks=True)
    place = tmp_path / "runs/run" / name
    place.unlink()
    place.mkdir()
    (place / "x").touch()
    done = fivefold(*words(tokens, "train.steps=2"), cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: cannot write runs/run/{name}\S*: .*directory.*; .* are free there\n", done.stderr)
    assert saved(tmp_path) == [1]


def _full_in_mid_run() -> None:
    """After three records of the metrics and of TensorBoard."""
    metrics.MetricsFile.on_step = _only(3, "file", metrics.MetricsFile.on_step)
    TensorBoard.step = _only(3, "records", TensorBoard.step)


def _only(times: int, name: str, on_step: Callable[..., None]) -> Callable[..., None]:
    def write(self: Any, record: records.Step) -> None:
        if record.step > times:
            setattr(self, name, SimpleNamespace(write=_no_room, fileno=self.file.fileno, close=self.file.close))
        on_step(self, record)

    return write


def test_a_disk_that_is_full_in_mid_run_stops_no_training_and_exit_code_0_is_not_given(
    tokens: Path, tmp_path: Path
) -> None:
    some = words(tokens, *TWO, "train.steps=6", "run.tensorboard=true")
    done = fivefold(*some, cwd=tmp_path, before=_full_in_mid_run)
    assert "step 6/6" in done.stdout, done.stderr
    assert saved(tmp_path) == [6]
    assert done.stdout.count("No space left on device") == 2  # each file says so once
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == (
        "error: all steps are done, but TensorBoard's file cannot be written: No space left on device; 3 records of "
        "runs/run/metrics.jsonl could not be kept: No space left on device"
    )
    assert [step.step for step in TrainResult.read(tmp_path / "runs/run").steps] == [1, 2, 3]


def test_a_trace_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    said: list[str] = []
    run = outputs.Outputs(tmp_path, read_job(None, []), {}, 0, said.append)
    run.traced = partial(_no_room)  # type: ignore[assignment]
    run.traced.path = tmp_path / "trace.json"
    run.trace(None)  # type: ignore[arg-type]
    run.close()
    assert said == [f"{tmp_path}/trace.json cannot be written: No space left on device; training continues without it"]
    with pytest.raises(TrainingError, match=r"all steps are done, but .*trace.json cannot be written"):
        run.check()


@pytest.mark.parametrize(("how", "more"), [("deleted", TWO), ("moved", [])])
def test_a_directory_that_vanishes_ends_the_run_with_a_checkpoint_in_a_new_one(
    tokens: Path, tmp_path: Path, how: str, more: list[str]
) -> None:
    directory = tmp_path / "runs/run"
    endless = words(tokens, *more, "train.steps=100000", "checkpoint.every=0")
    with start(*endless, cwd=tmp_path) as run:
        run.until("step      3/")
        directory.rename(tmp_path / "other")
        if how == "deleted":
            shutil.rmtree(tmp_path / "other")
        assert run.wait() == 1
    said = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert said == [
        "error: runs/run was deleted or moved away during the run; a new one has the last checkpoint, unless "
        "checkpoint.save=false, and the same command resumes from it"
    ]
    (step,) = saved(tmp_path)
    assert step >= 3
    assert (directory / "job.toml").exists()
    assert (directory / "runs.json").exists()
    on = fivefold(*words(tokens, *more, f"train.steps={step + 1}"), cwd=tmp_path)
    assert on.returncode == 0, on.stderr
    assert f"after step {step}" in on.stdout


def test_a_directory_that_vanishes_in_the_last_step_is_no_success(tokens: Path, tmp_path: Path) -> None:
    env = {"FIVEFOLD_FAULT": "stop@step=3"}
    with start(*words(tokens, "train.steps=3"), cwd=tmp_path, env=env) as run:
        run.until("step 2/3")
        run.until(lambda: "T (stopped)" in Path(f"/proc/{run.pid}/status").read_text())
        shutil.rmtree(tmp_path / "runs/run")
        run.send_signal(signal.SIGCONT)
        assert run.wait() == 1
    assert "runs/run was deleted or moved away during the run" in run.stderr
    assert [one.step for one in Store(tmp_path / "runs/run/checkpoints").complete()] == [3]


def _deaf() -> None:
    """Nobody reads what is printed."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)


def _full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


@pytest.mark.parametrize(("before", "more"), [(_deaf, TWO), (_full, [])])
def test_training_outlives_the_reader_of_what_it_prints(tokens: Path, tmp_path: Path, before, more: list[str]) -> None:
    done = fivefold(*words(tokens, *more, "train.steps=3"), cwd=tmp_path, before=before)
    assert (done.returncode, done.stderr) == (0, "")
    assert saved(tmp_path) == [3]


def test_a_plugin_whose_code_has_changed_since_the_last_start_is_named(tmp_path: Path) -> None:
    file = tmp_path / "environment.json"
    file.write_text(json.dumps({"plugins": {"a:A": "1", "b:B": "2"}}))
    assert outputs._other_plugins(file, {"plugins": {"a:A": "1", "b:B": "3", "c:C": "4"}}) == ["b:B"]
    for text in ("", "[]", '{"plugins": 3}', '{"fivefold": "0.1.0"}'):  # damaged, or of a release before
        file.write_text(text)
        assert outputs._other_plugins(file, {"plugins": {"a:A": "1"}}) == []
    assert outputs._other_plugins(tmp_path / "none", {"plugins": {"a:A": "1"}}) == []
