"""What is known to be wrong before a run."""

from pathlib import Path

import pytest

from fivefold.job.preflight import preflight
from fivefold.job.reading import read_job
from fivefold.launch.world import RESTARTS_ENV, RUN_ID_ENV
from fivefold.support.errors import UserError
from fivefold.trainer.directories import run_directory
from tests.refusals import refusal


def refused(*changes: str) -> UserError:
    return refusal(lambda: preflight(read_job(None, list(changes)), world=1))


def test_problems_of_job_data_and_directory_come_together(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refused("train.steps=0", "layout.tp=3", "data.path=nowhere", f"run.dir={tmp_path}/file/runs")
    assert error.codes == [
        "train.steps.range", "layout.tp.heads", "layout.ranks.given", "run.dir.write", "data.index.missing"
    ]  # fmt: skip


def test_splits_shorter_than_a_sample_are_named(tokens: Path) -> None:
    error = refused(f"data.path={tokens}", "data.seq=100000")
    assert error.codes == ["data.seq.tokens"] * 2
    assert [("the train split" in said, said.endswith("or train.eval_samples=0")) for said in error.problems] == [
        (True, False), (False, True)
    ]  # fmt: skip


def test_held_out_text_too_short_for_a_look_stops_no_run_that_does_not_look(tokens: Path) -> None:
    changes = [f"data.path={tokens}", "data.seq=1000"]
    assert refused(*changes).codes == ["data.seq.tokens"]
    assert preflight(read_job(None, [*changes, "train.eval_samples=0"]), world=1).valid is None


def test_the_built_in_text_is_for_small_models() -> None:
    """A job of a large model leaves data.path to be filled in, and nothing trains it by accident."""
    assert refused("model=llama3-70b").codes == ["data.path.missing"]
    assert preflight(read_job(None, ["model=small"]), world=1).train.tokens > 1e6


def test_a_layout_of_other_ranks_than_there_are_is_refused_with_both_ways_out() -> None:
    """A job for several nodes is launched."""
    ways = {"2x8xH100": "`fivefold launch` for the 2x8xH100 of run.cluster, with its 16"}
    for cluster in ("2x8xH100", "8xH100", "elsewhere.toml"):
        error = refused("layout=dp=16", f"run.cluster={cluster}")
        assert error.codes == ["layout.ranks.given"]
        assert str(error).endswith(f"nearest: dp=1, or {ways.get(cluster, '--nproc 16')}")


def test_run_directories_are_never_shared(tmp_path: Path, monkeypatch) -> None:
    def made(parent: str, fresh: bool) -> str:
        return run_directory(read_job(None, [f"run.dir={parent}", "run.name=a"]), fresh=fresh).name

    runs = str(tmp_path / "runs")
    assert [made(runs, fresh) for fresh in (False, False, True)] == ["a", "a-2", "a-3"]  # none has a checkpoint
    monkeypatch.setenv(RUN_ID_ENV, "abc")
    assert made(runs, True) == "a-4"
    (tmp_path / "runs/a-4/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "runs/a-4/checkpoints/step-00000001/manifest.json").write_text("")
    assert made(runs, False) == "a-4"
    monkeypatch.setenv(RESTARTS_ENV, "1")
    assert made(runs, True) == "a-4"  # started again by a launcher, with the same words
    monkeypatch.setenv(RUN_ID_ENV, "another")
    assert made(runs, True) == "a-5"
    with pytest.raises(UserError, match="cannot make the run's directory"):
        made("/proc/nothing", True)


CODES = {"~nouser/x": "path.home", "a" * 300: "path.length", "a/" * 2100: "path.length", "a\0b": "path.characters"}


@pytest.mark.parametrize("path", CODES)
def test_paths_that_no_file_can_have_are_refused(path: str) -> None:
    error = refused(f"run.dir={path}", f"data.path={path}")
    assert error.codes == [CODES[path]] * 2
    assert error.problems[0] == f"run.dir: {error.problems[1]}"
