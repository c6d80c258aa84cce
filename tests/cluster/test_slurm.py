"""Jobs on a Slurm of two nodes: as one process, through kills and time limits."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import FAST, losses
from tests.cluster.slurm import Slurm
from tests.commands import fivefold


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm("n1", "n2") as found:
        yield found


@pytest.fixture
def words(tokens: Path, tmp_path: Path) -> list[str]:
    return ["train", f"data.path={tokens}", *FAST, f"run.dir={tmp_path}/runs"]


def alone(words: list[str], folder: Path, *more: str) -> dict[int, float]:
    """The losses of one process."""
    done = fivefold(*words, *more, "run.name=alone", cwd=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder / "runs" / "alone")


def test_a_job_over_two_nodes_has_the_losses_of_one_process(slurm: Slurm, words: list[str], tmp_path: Path) -> None:
    out = slurm.run("srun", "-N2", "-n2", "-l", "fivefold", *words, "layout=dp=2", "train.steps=6", cwd=tmp_path)
    assert "0: step 6/6" in out
    assert losses(tmp_path / "runs" / "run") == pytest.approx(alone(words, tmp_path, "train.steps=6"), rel=1e-4)


def batch(folder: Path, words: list[str], *options: str) -> Path:
    """A script that runs a job, and requeues itself if that ends before its last step."""
    script = folder / "job.sbatch"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in ("--nodes=2", "--ntasks=2", "--requeue", "--open-mode=append", *options)),
        f"#SBATCH --output={folder}/out.txt",
        f"srun --kill-on-bad-exit=1 fivefold {' '.join(words)} layout=dp=2",
        "code=$?; echo start $((${SLURM_RESTART_COUNT:-0} + 1)) ended with $code",
        "[ $code = 0 ] || scontrol requeue $SLURM_JOB_ID",
    ]
    script.write_text("\n".join(lines) + "\n")
    return script


class Submitted:
    """A job in the queue, whose output is in `out.txt`."""

    def __init__(self, slurm: Slurm, folder: Path, number: str):
        self.slurm, self.out, self.number, self.run = slurm, folder / "out.txt", number, folder / "runs" / "run"

    @property
    def output(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def steps(self) -> int:
        """That its metrics have."""
        metrics = self.run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    @property
    def state(self) -> str:
        return re.findall(r"JobState=(\w+)", self.slurm.run("scontrol", "show", "job", self.number))[0]

    def until(self, seen: Callable[[], object], seconds: float = 300.0, pause: float = 0.05) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < deadline, f"{self.state}\n{self.output}"
            time.sleep(pause)


def submit(slurm: Slurm, script: Path, folder: Path) -> Submitted:
    return Submitted(slurm, folder, slurm.run("sbatch", "--parsable", script, cwd=folder).strip())


def test_a_job_whose_task_was_killed_goes_on_as_if_nothing_had_happened(
    slurm: Slurm, words: list[str], tmp_path: Path
) -> None:
    words += ["train.steps=300", "checkpoint.every=20"]
    job = submit(slurm, batch(tmp_path, words), tmp_path)
    job.until(lambda: job.steps > 50, pause=0.01)
    slurm.nodes["n2"].kill("fivefold train")
    job.until(lambda: job.state == "COMPLETED", pause=1.0)
    assert re.findall(r"start (\d) ended with (\d+)", job.output) == [("1", "137"), ("2", "0")]
    assert "resumes from" in job.output
    undisturbed = slurm.run("srun", "-N2", "-n2", "fivefold", *words, "layout=dp=2", "run.name=undisturbed")
    assert "resumes" not in undisturbed
    assert losses(job.run) == losses(tmp_path / "runs" / "undisturbed")
    assert list(losses(job.run)) == list(range(1, 301))


def test_a_job_near_its_time_limit_saves_and_goes_on(slurm: Slurm, words: list[str], tmp_path: Path) -> None:
    """Slurm's limits are minutes, and it looks twice a minute who is near to one."""
    words += ["train.steps=1000000", "checkpoint.every=1000000"]
    job = submit(slurm, batch(tmp_path, words, "--time=2", "--signal=USR1@60"), tmp_path)
    job.until(lambda: "start 1 ended" in job.output, pause=1.0)
    (stopped,) = re.findall(r"stopped by SIGUSR1 after step (\d+); its checkpoint is saved", job.output)
    assert "start 1 ended with 143" in job.output
    job.until(lambda: job.steps > int(stopped) + 5, pause=1.0)
    slurm.run("scancel", job.number)
    assert re.findall(r"resumes from \S+, after step (\d+)", job.output) == [stopped]
    job.until(lambda: job.state == "CANCELLED", pause=1.0)
    assert list(losses(job.run)) == list(range(1, job.steps + 1))
