"""What is known to be wrong before a run."""

from pathlib import Path

import pytest

from fivefold.job.config import read_job
from fivefold.job.preflight import preflight
from fivefold.launch.world import RESTARTS, RUN
from fivefold.support.errors import UserError
from fivefold.trainer.directories import run_directory


def problems_of(*changes: str) -> list[str]:
    with pytest.raises(UserError) as error:
        preflight(read_job(None, list(changes)), world=1)
    return error.value.problems


def test_problems_of_job_data_and_directory_come_together(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = problems_of("train.steps=0", "layout.tp=3", "data.path=nowhere", f"run.dir={tmp_path}/file/runs")
    assert len(found) == 5  # steps, heads, ranks, directory, data
    assert "nowhere" in found[-1]
    assert "not a directory that can be written to" in found[-2]


def test_a_layout_of_other_ranks_than_there_are_is_refused_with_both_ways_out(tokens: Path) -> None:
    [problem] = problems_of(f"data.path={tokens}", "layout=dp=2,zero=1", "data.seq=16", "train.eval_samples=1")
    assert "needs 2 ranks" in problem
    assert "dp=1, or --nproc 2" in problem


def test_splits_shorter_than_a_sample_are_named(tokens: Path) -> None:
    found = problems_of(f"data.path={tokens}", "data.seq=100000")
    assert len(found) == 2
    assert "the train split" in found[0]
    assert "or train.eval_samples=0" in found[1]


def test_held_out_text_too_short_for_a_look_stops_no_run_that_does_not_look(tokens: Path) -> None:
    changes = [f"data.path={tokens}", "data.seq=1000"]
    [problem] = problems_of(*changes)
    assert "the valid split" in problem
    assert preflight(read_job(None, [*changes, "train.eval_samples=0"]), world=1).valid is None


def test_the_built_in_text_is_for_small_models() -> None:
    """A job of a large model leaves data.path to be filled in, and nothing trains it by accident."""
    [problem] = problems_of("model=llama3-70b")
    assert "data.path is not filled in, and llama3-70b has 70.6B parameters" in problem
    assert "`fivefold data prepare`" in problem
    assert preflight(read_job(None, ["model=small"]), world=1).train.tokens > 1e6


def test_a_job_for_several_nodes_is_launched() -> None:
    [problem] = problems_of("layout=dp=16", "run.cluster=2x8xH100")
    assert problem.endswith("nearest: dp=1, or `fivefold launch` for the 2x8xH100 of run.cluster, with its 16")
    for other in ("8xH100", "elsewhere.toml"):
        assert problems_of("layout=dp=16", f"run.cluster={other}")[0].endswith("nearest: dp=1, or --nproc 16")


def test_run_directories_are_never_shared(tmp_path: Path, monkeypatch) -> None:
    def made(parent: str, fresh: bool) -> str:
        return run_directory(read_job(None, [f"run.dir={parent}", "run.name=a"]), fresh).name

    runs = str(tmp_path / "runs")
    assert [made(runs, fresh) for fresh in (False, False, True)] == ["a", "a-2", "a-3"]  # none has a checkpoint
    monkeypatch.setenv(RUN, "abc")
    assert made(runs, True) == "a-4"
    (tmp_path / "runs/a-4/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "runs/a-4/checkpoints/step-00000001/manifest.json").write_text("")
    assert made(runs, False) == "a-4"
    monkeypatch.setenv(RESTARTS, "1")
    assert made(runs, True) == "a-4"  # started again by a launcher, with the same words
    monkeypatch.setenv(RUN, "another")
    assert made(runs, True) == "a-5"
    with pytest.raises(UserError, match="cannot make the run's directory"):
        made("/proc/nothing", True)


@pytest.mark.parametrize("path", ["~nouser/x", "a" * 300, "a/" * 2100, "a\0b"])
def test_paths_that_no_file_can_have_are_refused(path: str) -> None:
    said = problems_of(f"run.dir={path}", f"data.path={path}")
    assert any(problem.startswith("run.dir: ") for problem in said)
    assert len(said) == 2
