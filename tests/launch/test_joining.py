"""`fivefold train` as ranks that others start, with Slurm's words: what belongs together trains, and nothing else."""

import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.commands import Command, fivefold, start
from tests.launch.test_meeting import free_port, listening

FAST = ["train.batch=4", "data.seq=16", "train.eval_samples=0", "model.layers=1", "model.hidden=32", "model.ffn=32",
        "train.device=cpu", "train.steps=6", "checkpoint.save=false", "train.log_every=1"]  # fmt: skip
SLURM = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}


class Steps:
    """Ranks of Slurm's steps, started one by one."""

    def __init__(self, tokens: Path, cwd: Path, stack: ExitStack):
        self._words, self._cwd, self._stack = ["train", f"data.path={tokens}", *FAST], cwd, stack

    def start(self, step: int, rank: int, *words: str, **env: str) -> Command:
        place = {"SLURM_STEP_ID": str(step), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        named = [f"run.name=step-{step}", "layout=dp=2", *words]
        return self._stack.enter_context(start(*self._words, *named, cwd=self._cwd, env=SLURM | place | env))

    def losses(self, name: str) -> list[float]:
        records = map(json.loads, (self._cwd / "runs" / name / "metrics.jsonl").read_text().splitlines())
        return [record["loss"] for record in records if record["kind"] == "step"]

    def alone(self, *words: str) -> list[float]:
        """What one process makes of the same job."""
        assert fivefold(*self._words, "run.name=alone", "--fresh", *words, cwd=self._cwd).returncode == 0
        newest = max((self._cwd / "runs").glob("alone*"), key=lambda path: path.stat().st_mtime_ns)
        return self.losses(newest.name)


@pytest.fixture
def steps(tokens: Path, tmp_path: Path):
    with ExitStack() as stack:
        yield Steps(tokens, tmp_path, stack)


def trained(folder: Path) -> list[Path]:
    return list(folder.glob("runs/*/metrics.jsonl"))


def test_ranks_of_two_steps_of_one_job_do_not_train_together(steps: Steps, tmp_path: Path) -> None:
    begin = time.monotonic()
    first, second = steps.start(0, 1, "train.timeout=3"), steps.start(1, 0, "train.timeout=3", "train.seed=1")
    assert (first.wait(), second.wait()) == (3, 3)
    assert time.monotonic() - begin < 60
    assert "rank 0 has not joined within 3 s: nothing listens at 127.0.0.1:" in first.stderr
    assert "rank 1 has not joined within 3 s; 1 of 2 is here" in second.stderr
    assert not trained(tmp_path)


def test_steps_that_overlap_finish_with_their_own_losses(steps: Steps) -> None:
    ranks = [steps.start(step, rank, f"train.seed={step}") for rank in (1, 0) for step in (0, 1)]
    assert [rank.wait() for rank in ranks] == [0] * 4
    for step in (0, 1):
        assert steps.losses(f"step-{step}") == pytest.approx(steps.alone(f"train.seed={step}"), rel=1e-4)
    assert steps.losses("step-0") != steps.losses("step-1")


def test_ranks_of_two_jobs_at_one_port_end_with_an_error_that_names_the_setting(steps: Steps, tmp_path: Path) -> None:
    port = {"MASTER_PORT": str(free_port())}
    ranks = [steps.start(0, 0, **port), steps.start(0, 1, "train.seed=1", **port)]
    assert [rank.wait() for rank in ranks] == [2, 2]
    for rank in ranks:
        assert "runs another job: train.seed is 1 there and 0 elsewhere" in " ".join(rank.stderr.split())
    assert not trained(tmp_path)


def test_a_process_with_another_secret_is_refused(steps: Steps, tmp_path: Path) -> None:
    ranks = [steps.start(0, rank, FIVEFOLD_SECRET=f"the secret of rank {rank}") for rank in (0, 1)]
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert "a process that says it is rank 1 on" in ranks[0].stderr
    assert "does not know this run's secret" in ranks[1].stderr
    assert not trained(tmp_path)


def test_two_directories_of_one_name_are_named(tokens: Path, tmp_path: Path) -> None:
    """What each rank takes for run.dir is not the same directory, and nobody has set FIVEFOLD_SECRET."""
    port, here = str(free_port()), socket.gethostname()
    folders = [tmp_path / "a", tmp_path / "b"]
    with ExitStack() as stack:
        ranks = []
        for rank, folder in enumerate(folders):
            folder.mkdir()
            env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": port}  # fmt: skip
            words = ["train", f"data.path={tokens}", *FAST, "layout=dp=2", "train.timeout=30"]
            ranks.append(stack.enter_context(start(*words, cwd=folder, env=env)))
        assert [rank.wait() for rank in ranks] == [2, 2]
    first, second = (f"{folder / 'runs' / '.secret'} on {here}" for folder in folders)
    said = [" ".join(rank.stderr.split()) for rank in ranks]
    assert f"its secret is from {second}, and rank 0's from {first}; make run.dir one directory" in said[0]
    assert f"its secret is from {first}, and this rank's from {second}; make run.dir one directory" in said[1]


def test_a_busy_port_is_told_at_once(steps: Steps) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        first = steps.start(0, 0, MASTER_PORT=str(port))
        assert first.wait() == 2
        assert f"rank 0 cannot listen at 127.0.0.1:{port}: another process listens there" in first.stderr


def test_ranks_of_this_machine_listen_on_loopback_alone(tokens: Path, tmp_path: Path) -> None:
    words = ["train", f"data.path={tokens}", *FAST, "train.steps=100000", "layout=tp=2", "--nproc", "2"]
    with start(*words, cwd=tmp_path) as run:
        run.until("step      3/")
        found = [listening(pid) for pid in (run.pid, *run.children)]
    assert found == [set(), {"127.0.0.1"}, {"127.0.0.1"}]
