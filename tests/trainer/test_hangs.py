"""Ranks that fall silent: every wait ends after train.timeout seconds without movement, and names who and where."""

import os
import time
from pathlib import Path

import pytest

from fivefold.checkpoint import save
from fivefold.job.config import Job
from fivefold.launch import heartbeat
from fivefold.launch.watchdog import watch
from fivefold.parallel.control import Control
from tests.checkpoint.runs import Run, small_job
from tests.commands import fivefold
from tests.ranks import run_ranks

pytestmark = pytest.mark.waits
TINY = ["train.batch=4", "data.seq=16", "train.eval_samples=0", "model.layers=2", "model.hidden=32", "model.ffn=48",
        "train.device=cpu", "train.steps=3", "train.timeout=2"]  # fmt: skip
TWO = ["--nproc", "2", "layout=dp=2"]


def lines(tokens: Path, folder: Path, fault: str, *words: str) -> list[str]:
    """What a run that ends for a fault says."""
    done = fivefold("train", f"data.path={tokens}", *TINY, *words, cwd=folder, env={"FIVEFOLD_FAULT": fault})
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops_in_a_save_is_named(tokens: Path, tmp_path: Path, rank: int) -> None:
    said = lines(tokens, tmp_path, f"stop@rank={rank},at=write", *TWO)
    other = 1 - rank
    assert said[0].startswith(f"error: rank {other} (dp {other}) waited ")
    assert f"for rank {rank}, which has not moved for " in said[0]
    assert said[0].endswith("s, and was last seen in step 3, and concurrently in the checkpoint of step 3")
    assert said[-1].startswith(f"rank {rank} (dp {rank}) did not end with the others; it last moved ")
    assert "in step 3, and concurrently in the checkpoint of step 3" in said[-1]


def test_a_rank_that_stops_in_a_load_is_named(tokens: Path, tmp_path: Path) -> None:
    assert fivefold("train", f"data.path={tokens}", *TINY, *TWO, cwd=tmp_path).returncode == 0
    said = lines(tokens, tmp_path, "stop@rank=1,at=read", *TWO, "train.steps=5")
    assert said[0].startswith("error: rank 0 (dp 0) waited ")
    assert "for rank 1, which has not moved for " in said[0]
    assert said[-1].startswith("rank 1 (dp 1) did not end with the others; it last moved ")
    assert "ago, in the reading of step-00000003" in said[-1]


def test_ranks_that_all_stop_at_once_are_ended_and_named(tokens: Path, tmp_path: Path) -> None:
    said = lines(tokens, tmp_path, "stop@step=2", *TWO)
    for rank in (0, 1):
        (line,) = (line for line in said if line.startswith(f"rank {rank} "))
        assert line.startswith(f"rank {rank} (dp {rank}) gave no answer; it last moved ")
        assert "s ago, in step 2; it is in " in line
        assert "faults.py" in line


def test_a_process_that_hangs_prints_its_stack_and_ends(tokens: Path, tmp_path: Path) -> None:
    said = lines(tokens, tmp_path, "hang@step=2")
    assert any("faults.py" in line and "in strike" in line for line in said)
    assert said[-1].startswith("error: rank 0 has not moved for ")
    assert said[-1].endswith(" s in step 2")


def test_a_rank_that_hangs_says_where(tokens: Path, tmp_path: Path) -> None:
    said = lines(tokens, tmp_path, "hang@rank=1,step=2", *TWO)
    assert any("step 2: rank 0 (dp 0): the gradient norm waited 2." in line for line in said)
    assert any(line.startswith("error: rank 1 has not moved for ") for line in said)
    assert said[-1].startswith("rank 1 (dp 1) failed with exit code 1")


def save_slowly(rank: int, world: int, job: Job, directory: Path) -> tuple[float, list[int]]:
    """Each piece of a file takes rank 1 a while; how long the save took, and what there is then."""
    run, start = Run(job, world, directory), time.monotonic()
    run.keeper.control = run.keeper.saver.control = Control(run.trainer.mesh, timeout=1.0)
    if rank == 1:
        save.beat = lambda size: (time.sleep(0.08), heartbeat.beat(size))
    with watch(1.0, rank, world):
        heartbeat.enter("step 1")  # whose limit is the short one
        run.keeper.save(1)
        assert run.keeper.saver.finish() is None
    return time.monotonic() - start, [one.step for one in run.keeper.store.complete()]


def test_a_slow_save_that_moves_is_waited_for(tokens: Path, tmp_path: Path) -> None:
    for seconds, steps in run_ranks(2, save_slowly, small_job(tokens, "layout=dp=2,zero=1"), tmp_path):
        assert seconds > 3.0
        assert steps == [1]


def test_a_suspended_watcher_counts_only_its_own_time(tmp_path: Path) -> None:
    board = heartbeat.Board(tmp_path / "beats", 1)
    os.environ[heartbeat.BEATS_ENV] = str(tmp_path / "beats")
    try:
        with watch(0.5):
            heartbeat.enter("step 1")
            assert not board.still([0])
            board.ranks[0].last -= 3600  # an hour in which this process slept
            assert not board.still([0])
            board.ranks[0].seconds = 3600
            assert board.still([0])
            assert board.last(0).endswith("s ago, in step 1")
            heartbeat.beat()
            assert not board.still([0])
    finally:
        del os.environ[heartbeat.BEATS_ENV]
