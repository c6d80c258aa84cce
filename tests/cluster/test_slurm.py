"""Jobs on a Slurm of two nodes, started by hand and by `fivefold launch --submit`, through kills and time limits; on
three nodes, of which one is lost and comes back."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from fivefold.trainer.restart_time import RECOVERIES_FILE, RestartTime
from tests.cluster.conftest import FAST, losses
from tests.cluster.slurm import Slurm
from tests.commands import fivefold


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm("n1", "n2") as found:
        yield found


@pytest.fixture
def words(tokens: Path) -> list[str]:
    return [f"data.path={tokens}", *FAST]


def test_a_job_over_two_nodes_has_the_losses_of_one_process(slurm: Slurm, words: list[str], tmp_path: Path) -> None:
    words = ["fivefold", "train", *words, "train.steps=6"]
    out = slurm.run("srun", "-N2", "-n2", "-l", *words, "layout=dp=2", cwd=tmp_path)
    assert "0: step 6/6" in out
    done = fivefold(*words[1:], "run.name=alone", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "runs" / "run") == pytest.approx(losses(tmp_path / "runs" / "alone"), rel=1e-4)


class Submitted:
    """A job that `fivefold launch --slurm --submit` has put into the queue, from the head node."""

    def __init__(self, slurm: Slurm, folder: Path, words: list[str], *options: str):
        self.slurm, self.folder = slurm, folder
        self.run = folder / "runs" / "run"
        folder.mkdir(exist_ok=True)
        options = "--slurm", "--nodes=2", "--partition=all", "--account=", *options
        self.number = self.submit("fivefold", "launch", *words, "layout=dp=2", *options)

    def submit(self, *words: str) -> str:
        said = self.slurm.run(*words, "--submit", cwd=self.folder)
        (number,) = re.findall(r"^ *squeue --jobs=(\d+)", said, re.M)
        return number

    @property
    def output(self) -> str:
        """Of the script and of rank 0."""
        files = self.folder / f"run-{self.number}.out", self.folder / f"runs/slurm-{self.number}/rank-0.log"
        return "".join(file.read_text() for file in files if file.exists())

    @property
    def steps(self) -> int:
        """That its metrics have."""
        metrics = self.run / "metrics.jsonl"
        return metrics.read_text().count('"kind":"step"') if metrics.exists() else 0  # a last line may be half written

    @property
    def recoveries(self) -> list[RestartTime]:
        file = self.run / RECOVERIES_FILE
        lines = file.read_bytes().splitlines() if file.exists() else []
        return [msgspec.json.decode(line, type=RestartTime) for line in lines]

    @property
    def state(self) -> str:
        return re.findall(r"JobState=(\w+)", self.slurm.run("scontrol", "show", "job", self.number))[0]

    def until(self, seen: Callable[[], object], seconds: float = 300.0, pause: float = 1.0) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < deadline, f"{self.state}\n{self.output}"
            time.sleep(pause)


def test_a_submitted_job_whose_task_is_killed_goes_on_as_if_nothing_had_happened(
    slurm: Slurm, words: list[str], tmp_path: Path
) -> None:
    words += ["train.steps=120", "checkpoint.every=10"]
    calm = Submitted(slurm, tmp_path / "calm", words)
    calm.until(lambda: calm.state == "COMPLETED")
    assert "done at" in calm.output
    assert list(losses(calm.run)) == list(range(1, 121))
    killed = Submitted(slurm, tmp_path / "killed", words)
    killed.until(lambda: killed.steps > 30, pause=0.01)
    slurm.nodes["n2"].kill("fivefold train")
    killed.until(lambda: killed.state == "COMPLETED")
    assert "failed with code 137, 1 in a row" in killed.output
    assert re.search(r"resumes from \S+, after step \d+", killed.output)
    assert losses(killed.run) == losses(calm.run)


def test_a_job_near_its_time_limit_saves_and_goes_on(slurm: Slurm, words: list[str], tmp_path: Path) -> None:
    """Of a short limit, ranks have half to train; Slurm looks twice a minute which job is near to its own."""
    words += ["train.steps=1000000", "checkpoint.every=1000000"]
    job = Submitted(slurm, tmp_path, words, "--time=4")
    job.until(lambda: "stopped by SIGUSR1" in job.output)
    (stopped,) = re.findall(r"stopped by SIGUSR1 after step (\d+); its checkpoint is saved", job.output)
    assert "told to stop (time limit)" in job.output
    job.until(lambda: job.steps > int(stopped) + 5)
    slurm.run("scancel", job.number)
    job.until(lambda: job.state == "CANCELLED")
    assert re.findall(r"resumes from \S+, after step (\d+)", job.output) == [stopped]
    assert list(losses(job.run)) == list(range(1, job.steps + 1))


class Elastic(Submitted):
    """Of three nodes or two; it looks for nodes that it lacks every two seconds."""

    def submit(self, *words: str) -> str:
        words = tuple(word for word in words if not word.startswith(("layout=", "--nodes")))
        self.slurm.run(*words, "layout=dp=3,tp=2", "--nodes=3", "--elastic", "-o", "run.sbatch", cwd=self.folder)
        file = self.folder / "run.sbatch"
        assert "\ngrow=600 " in file.read_text()
        file.write_text(file.read_text().replace("\ngrow=600 ", "\ngrow=2 "))
        return self.slurm.run("sbatch", "--parsable", file, cwd=self.folder).strip()


def test_a_node_is_lost_and_comes_back(words: list[str], tmp_path: Path) -> None:
    words += ["train.dtype=float64", "train.batch=12", "checkpoint.every=10", "optimizer.schedule_steps=1000000"]
    with Slurm("n1", "n2", "n3") as slurm:
        job = Elastic(slurm, tmp_path, [*words, "train.steps=1000000"])
        job.until(lambda: job.steps > 20, pause=0.01)
        slurm.lose("n1")  # which also runs the script
        job.until(lambda: len(job.recoveries) == 1)
        assert "2 of 3 nodes; looks for more every 2 s" in job.output
        slurm.regain("n1")
        job.until(lambda: len(job.recoveries) == 2)
        assert "told to stop (to grow: it has 2 of 3 nodes, and would get more)" in job.output
        job.until(lambda: job.steps > job.recoveries[1].step + 20)
        slurm.run("scancel", job.number)
        job.until(lambda: job.state == "CANCELLED")
    fewer, more = job.recoveries
    assert (fewer.ranks, fewer.step > 20) == (4, True)
    assert (more.ranks, more.layout, more.step - more.resumed) == (6, "dp=3,tp=2", 0)
    # Every step once, and each as if nothing had happened: the same samples, in other orders of addition.
    found = losses(job.run)
    assert list(found) == list(range(1, job.steps + 1))
    done = fivefold("train", *words, f"train.steps={job.steps}", "run.name=alone", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert found == pytest.approx(losses(tmp_path / "runs" / "alone"), rel=1e-10)
    print(*(line for line in job.output.splitlines() if "recovered in" in line), sep="\n")
