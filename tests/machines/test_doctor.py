"""`fivefold doctor` with real ranks: what is planted is found, and named."""

import json
import os
import re
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivefold.cli.options import split_job_and_changes
from fivefold.job.reading import read_job
from fivefold.launch import faults
from fivefold.machines import doctor as front
from fivefold.machines import examine, node
from fivefold.machines.calibrate import device_name
from fivefold.machines.examine import turns
from fivefold.machines.judge import Examination, RankReport, findings
from fivefold.parallel.mesh import Mesh
from tests.commands import fivefold, start
from tests.launch.test_joining import FAST
from tests.launch.test_meeting import free_port
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
WORDS = ["layout=dp=4", "train.device=cpu"]


def planted(rank: int, world: int, folder: str) -> RankReport:
    """Four nodes of one rank: one has another torch and a clock that is ahead, one slow matmuls, one a slow disk."""
    job = read_job(None, [*WORDS, f"run.dir={folder}"])
    node.node_name = lambda: "abcd"[rank]  # type: ignore[assignment]
    node._PIECES, examine._SUSTAINED["cpu"], examine._SIZES["cpu"] = 1, 0.05, (1 << 10, 1 << 18)
    usual = node.versions
    if rank == 1:
        node.versions = lambda cuda: usual(cuda) | {"torch": "2.10.0"}
        examine.time = SimpleNamespace(time=lambda: time.time() + 7, perf_counter=time.perf_counter)  # type: ignore[assignment]
    if rank == 2:
        os.environ["FIVEFOLD_FAULT"] = "slow@rank=2,at=matmul"
    if rank == 3:
        os.environ["FIVEFOLD_FAULT"], faults._SLOW_SECONDS = "slow@rank=3,at=disk", 2.0
    return examine.examine(job, Mesh.of(job.layout, torch.device("cpu")), first_of_node=True)


def test_what_is_planted_is_found(tmp_path: Path) -> None:
    reports = run_ranks(4, planted, str(tmp_path / "runs"))
    said = findings(Examination(read_job(None, WORDS), reports))
    assert any(one.startswith("versions: torch is 2.10.0 on node b (rank 1), and 2.1") for one in said), said
    # The others share cores and a disk here, and may be slow in turns.
    assert any(one.startswith("matmuls: ") and "node c (rank 2) reach" in one for one in said), said
    assert any(one.startswith("disk: writes to run.dir: ") and "node d (rank 3) reach" in one for one in said), said
    (clock,) = [one for one in said if one.startswith("clocks:")]
    assert re.match(r"clocks: that of node b is (6\.9|7\.0)", clock)
    assert [send.ranks for one in reports for send in one.sends] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    (ring,) = [ring for one in reports for ring in one.rings]
    assert (ring.axis, ring.ranks) == ("dp", [0, 1, 2, 3])
    assert list((tmp_path / "runs").iterdir()) == []


def test_ranks_that_slurm_started_are_examined_and_rank_0_reports(tmp_path: Path) -> None:
    """Two nodes by name, a job without data, versions compared: with a rank that trains no rank is examined."""
    words = ["layout=dp=2", "train.device=cpu", "train.timeout=60"]

    def ranks(stack: ExitStack, *commands: str) -> list[tuple[int, str, str]]:
        port, runs = str(free_port()), []
        for rank, command in enumerate(commands):
            env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost",
                   "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURMD_NODENAME": f"node{rank}",
                   "MASTER_PORT": port}  # fmt: skip
            runs.append(stack.enter_context(start(*command.split(), *words, cwd=tmp_path, env=env)))
        return [(run.wait(), run.stdout, run.stderr) for run in runs]

    with ExitStack() as stack:
        (code, out, _), (other, nothing, _) = ranks(stack, "doctor --json data.path=later", "doctor --json data.path=x")
    found = json.loads(out)
    assert (code, other, nothing) == (0 if found["ok"] else 1, 0, "")
    assert [one["node"] for one in found["ranks"]] == ["node0", "node1"]
    assert all(one["disk"]["write"] > 0 for one in found["ranks"])
    with ExitStack() as stack:
        first, second = ranks(stack, "doctor", "train")
    assert (first[0], second[0]) == (2, 2)
    assert "is here for training, and the others for an examination" in " ".join(second[2].split())


def test_a_slow_rank_is_noted_before_the_first_step(tokens: Path, tmp_path: Path) -> None:
    words = ["layout=dp=4", "--nproc", "4", f"data.path={tokens}", *FAST, "train.steps=1"]
    done = fivefold("train", *words, cwd=tmp_path, env={"FIVEFOLD_FAULT": "slow@rank=2,at=matmul"})
    assert done.returncode == 0, done.stderr
    noted, _, steps = done.stdout.partition("step 1/")
    (note,) = [line for line in noted.splitlines() if line.startswith("note  matmuls: rank")]
    ranks = re.findall(r"\d+", note.partition(" on ")[0])
    assert "2" in ranks  # a machine with other work may make another one slow, too
    assert "of the median of the others" in note
    assert steps


def test_bad_input_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    done = fivefold("doctor", "layout=dp=4", "run.cluster=4xH1000", "--nproc", "3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "4 ranks" in done.stderr
    assert "unknown accelerator 'H1000'" in done.stderr


def test_the_ranks_of_other_machines_are_not_started_on_this_one(tmp_path: Path) -> None:
    done = fivefold("doctor", "layout=dp=4", "run.cluster=2x2xCPU", "train.batch=8", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    said, words = " ".join(done.stderr.split()), "fivefold doctor layout=dp=4 run.cluster=2x2xCPU train.batch=8"
    assert "4 ranks are too many for this machine alone: they are those of 2 nodes" in said
    assert f"srun -N2 --ntasks-per-node=2 {words}, or on each node torchrun --nnodes=2 --nproc-per-node=2" in said
    assert f"-m {words} (--nproc 4 starts all of them here)" in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([str(ROOT / "recipes/llama3-405b-2048x8xH100.toml")], "srun -N2048 --ntasks-per-node=8 fivefold doctor W, or"),
        (["layout=dp=9"], "this machine has 2 cores; start it where the job will run: srun -n9 fivefold doctor W ("),
        (["layout=dp=9", "run.cluster=3x2xCPU+3x1xCPU"], "srun -n9 fivefold doctor W ("),
        (["layout=dp=8"], ""),
        (["layout=dp=4", "run.cluster=2x4xCPU"], ""),
    ],
)
def test_too_many_ranks_for_a_machine_of_two_cores(
    monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    monkeypatch.setattr(front, "cores", lambda: 2)
    path, changes = split_job_and_changes(words)
    said = front._elsewhere(read_job(path, changes), "W")
    assert line in said
    assert bool(line) == bool(said)


def test_the_job_of_a_run_is_examined_and_a_cpu_is_not_the_gpu_that_was_planned(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "job.toml").write_text('train.device = "cpu"\nrun.cluster = "8xH100"\n')
    done = fivefold("doctor", "runs/mine", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert f"cluster: rank 0 on {node.node_name()} has a CPU, and the job was planned for H100" in found["findings"]
    assert not [one for one in found["findings"] if "the planner expects" in one]


@pytest.mark.parametrize(("threads", "text"), [(1, "a CPU, 1 thread"), (2, "a CPU, 2 threads")])
def test_a_cpu_is_named_with_its_threads(monkeypatch: pytest.MonkeyPatch, threads: int, text: str) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert device_name(torch.device("cpu")) == text


def test_the_help_fits_80_columns(tmp_path: Path) -> None:
    text = fivefold("doctor", "--help", cwd=tmp_path, env={"COLUMNS": "80"}).stdout
    assert "RUN" in text
    assert not re.findall(r"^ \w+ *$", text, re.M)  # a word that is left of a line that was too long


def test_a_slow_kind_of_fault_takes_a_quarter_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_FAULT", "slow@at=link")
    start = time.monotonic()
    faults.strike("disk")
    middle = time.monotonic()
    faults.strike("link")
    assert middle - start < 0.25 <= time.monotonic() - middle


@pytest.mark.parametrize("size", range(2, 9))
def test_every_neighbour_gets_a_turn_and_no_rank_has_two_partners(size: int) -> None:
    every = [pair for turn in turns(size) for pair in turn]
    assert sorted(every) == [(at, (at + 1) % size) for at in range(size if size > 2 else 1)]
    for turn in turns(size):
        ranks = [rank for pair in turn for rank in pair]
        assert len(ranks) == len(set(ranks))
