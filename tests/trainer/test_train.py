"""`fivefold.trainer` from Python: other processes train, and what they leave comes back."""

import sys
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.data.prepare import prepare
from fivefold.support.errors import TrainingError
from tests.commands import executable

SMALL = ["model.layers=2", "model.hidden=32", "model.ffn=48", "data.seq=16", "train.batch=4", "train.device=cpu",
         "train.eval_samples=0", "train.log_every=1"]  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> ff.Job:
    (tmp_path / "text.txt").write_text("The same few words, again and again. " * 200)
    prepare([tmp_path / "text.txt"], tmp_path / "tokens")
    words = [f"data.path={tmp_path}/tokens", f"run.dir={tmp_path}/runs", "train.steps=3", "layout=dp=2"]
    return ff.read_job(None, [*SMALL, *words])


def test_a_run_returns_its_losses_and_its_directory(job: ff.Job, tmp_path: Path) -> None:
    """A new directory, as `fresh` asks for it: that of an earlier run is there."""
    (tmp_path / "runs/run").mkdir(parents=True)
    lines: list[str] = []
    found = ff.train(job, fresh=True, progress=lines.append)
    assert found.directory == tmp_path / "runs" / "run-2"
    assert [step.step for step in found.steps] == [1, 2, 3]
    assert found.losses[-1] < found.losses[0]
    assert any(line.startswith("3 steps in ") for line in lines)
    assert (found.directory / "job.toml").is_file()


def test_bad_input_and_a_run_that_breaks_are_errors(
    job: ff.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable(tmp_path))
    with pytest.raises(ff.UserError, match="tp=3 does not divide"):
        ff.train(None, [*SMALL, "layout=tp=3"])
    monkeypatch.setenv("FIVEFOLD_FAULT", "raise@rank=1,step=2")
    with pytest.raises(TrainingError):
        ff.train(job)
