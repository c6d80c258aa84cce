"""A run that loses ranks for good, goes on without them, and takes them back: one loss curve."""

from pathlib import Path

import msgspec
import pytest

from fivefold.trainer.restart_time import RECOVERIES_FILE, RestartTime
from tests.cli.test_checkpoint import FAST, tokens  # noqa: F401 - a fixture
from tests.cli.test_cli import losses
from tests.commands import fivefold

SMALL = ["train", *FAST, "train.dtype=float64", "train.batch=12", "--nproc", "4", "layout=tp=2,pp=2",
         "checkpoint.every=3", "elastic.probe=0.1"]  # fmt: skip


def test_ranks_are_lost_and_come_back(tokens: Path, tmp_path: Path) -> None:  # noqa: F811
    words = [*SMALL, f"data.path={tokens}", "train.steps=40"]
    whole = fivefold(*words, "run.name=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    done = fivefold(*words, "--elastic", cwd=tmp_path, env={"FIVEFOLD_FAULT": "lose@rank=3,step=5,until=12"})
    assert done.returncode == 0, done.stderr
    assert "rank 3 does not answer: 3 of 4 are here\nelastic: layout " in done.stderr
    assert "rank 3 is back: 4 of 4 are here" in done.stderr
    # Every step once, and each as if nothing had happened: the same samples, in other orders of addition.
    want, found = losses(tmp_path / "runs/whole"), losses(tmp_path / "runs/run")
    assert len(found) == 40
    assert found == pytest.approx(want, rel=1e-10)
    lines = (tmp_path / "runs/run" / RECOVERIES_FILE).read_bytes().splitlines()
    fewer, more = (msgspec.json.decode(line, type=RestartTime) for line in lines)
    assert (fewer.step, fewer.resumed, fewer.ranks) == (4, 3, 3)
    assert (more.ranks, more.layout, more.step - more.resumed) == (4, "tp=2,pp=2", 0)
    assert 12 <= more.step < 40


def test_an_elastic_run_ends_where_its_job_says(tokens: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ["train", f"data.path={tokens}", *FAST, "--nproc", "2", "layout=dp=2", "train.steps=4", "--elastic"]
    fault = {"FIVEFOLD_FAULT": "lose@rank=1,step=2"}
    done = fivefold(*words, "elastic.least=2", "checkpoint.every=1", cwd=tmp_path, env=fault)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "error: 1 ranks are left, and elastic.least=2 asks for more; the run resumes when they are back, or with "
        "elastic.least=1\n"
    )
    refused = fivefold(*words, "checkpoint.save=false", "--check", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--elastic resumes from checkpoints, but checkpoint.save=false writes none" in refused.stderr
    alone = fivefold("train", "--elastic", cwd=tmp_path)
    assert (alone.returncode, "--elastic needs ranks to lose" in alone.stderr) == (2, True)


@pytest.mark.slow
def test_a_stored_run_loses_a_rank_and_one_that_fails_while_it_grows_grows_in_the_next_start(
    tokens: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    assert fivefold(*SMALL, f"data.path={tokens}", "train.steps=4", cwd=tmp_path).returncode == 0
    faults = "lose@rank=3,step=6,until=9;raise@rank=1,at=write,start=1"
    done = fivefold("train", "runs/run", "train.steps=24", "--nproc", "4", "--elastic", "checkpoint.every=100",
                    cwd=tmp_path, env={"FIVEFOLD_FAULT": faults})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 3 is back: 4 of 4 are here" in done.stderr
    assert len(losses(tmp_path / "runs/run")) == 24
    last_line = (tmp_path / "runs/run" / RECOVERIES_FILE).read_bytes().splitlines()[-1]
    last = msgspec.json.decode(last_line, type=RestartTime)
    assert (last.ranks, last.layout) == (4, "tp=2,pp=2")
