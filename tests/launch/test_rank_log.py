"""Every rank's log has what it printed, once, and its last words, however it ended."""

import os
import signal
import sys
from pathlib import Path

import pytest

from fivefold.launch import rank_log
from fivefold.launch.processes import RankError
from fivefold.launch.world import World
from tests.commands import fivefold
from tests.launch.test_joining import FAST, SLURM
from tests.ranks import run_ranks


def say_and_die(rank: int, world: int, folder: str, lock_file: str, max_bytes: int) -> None:
    os.environ[rank_log.LOCK_FILE], rank_log.MAX_BYTES = lock_file, max_bytes
    rank_log.capture(Path(folder), World(rank, world, joined=True))
    print("from Python", flush=True)
    print("an error", file=sys.stderr)
    os.write(1, b"from a library\n")  # past Python's buffers, as NCCL and glibc write
    os.write(2, b"last words" + b"." * 500 + b"\n")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_has_its_last_words_in_the_log(tmp_path: Path) -> None:
    lock_file = tmp_path / "lock"
    for max_bytes in (1 << 20, 200):
        with pytest.raises(RankError, match="SIGKILL"):
            run_ranks(1, say_and_die, str(tmp_path / "logs"), str(lock_file), max_bytes)
        rank_log.wait_until_written(lock_file)
    first, second = (tmp_path / "logs" / "rank-0.log").read_text().split("=" * 20)[1:]  # appended
    assert " rank 0 of 1 on " in first.splitlines()[0]
    words = ["from Python", "an error", "from a library", "last words" + "." * 500]
    assert sorted(first.splitlines()[1:]) == sorted(words)
    assert len(second) < 500
    assert "[the log of this start ends here, after 200 bytes]" in second


def test_ranks_of_nproc_have_logs_over_restarts_with_their_stacks(tokens: Path, tmp_path: Path) -> None:
    words = [f"data.path={tokens}", *FAST, "layout=dp=2", "--nproc", "2", "--restarts", "1", "checkpoint.save=true"]
    done = fivefold("train", *words, "train.steps=2", cwd=tmp_path, env={"FIVEFOLD_FAULT": "segv@rank=1,step=2"})
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "run" / "logs"
    zero, one = ((folder / f"rank-{rank}.log").read_text() for rank in (0, 1))
    assert [line.rpartition(", ")[2] for line in one.splitlines() if line.startswith("====")] == ["start 1", "start 2"]
    assert "Fatal Python error: Segmentation fault" in one
    assert "in strike" in one
    assert "lost its connection" in zero or "waited" in zero
    steps = [line for line in zero.splitlines() if line.startswith("step ")]
    assert steps == [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert done.stderr.count("was ended by SIGSEGV in step 2") == 1


def test_a_rank_of_another_launcher_keeps_its_log(tokens: Path, tmp_path: Path) -> None:
    place = {"SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    place["SLURM_JOB_ID"] = "91"  # its own: ranks of one job and step meet at one port
    done = fivefold("train", f"data.path={tokens}", *FAST, "train.steps=2", cwd=tmp_path, env=SLURM | place)
    assert (done.returncode, done.stderr) == (0, "")
    header, *lines = (tmp_path / "runs" / "run" / "logs" / "rank-0.log").read_text().splitlines()
    assert " rank 0 of 1 on " in header
    assert lines == done.stdout.splitlines()


def test_a_log_that_cannot_be_written_costs_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").touch()
    rank_log.capture(tmp_path / "logs", World())
    assert "no log is kept in" in capsys.readouterr().err


def test_a_copier_that_cannot_start_costs_a_note_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_log.tee, "__file__", str(tmp_path / "none.py"))
    before = os.listdir("/proc/self/fd")
    rank_log.capture(tmp_path / "logs", World())
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert "no log is kept in" in capsys.readouterr().err
    print("still shown")
    assert "still shown" in capsys.readouterr().out
