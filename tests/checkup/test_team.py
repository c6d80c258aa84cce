"""Words of the commands, and ranks that a launcher has started."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from fivefold.checkup.command import CommandEnd
from fivefold.checkup.lost_rank import sentences_about
from fivefold.checkup.tasks import Task, TypedJob, check_task, task_env, task_words
from fivefold.checkup.team import rank_env
from fivefold.job.reading import read_job
from fivefold.launch.rendezvous import Rendezvous
from fivefold.launch.world import World, current_world
from fivefold.support.errors import UserError

TOKEN = "0c1d2e3f"


def base(*words: str) -> TypedJob:
    return TypedJob(
        read_job(None, [*words, "run.dir=/shared/runs"]), words, any(word.startswith("model") for word in words)
    )


def task(kind: str, **settings: object) -> Task:
    return msgspec.convert({"kind": kind, "token": TOKEN, "device": "cuda", "ranks": 4} | settings, Task)


@pytest.mark.parametrize("kind", ["doctor", "lose", "calibrate", "train"])
def test_only_ranks_that_nobody_started_are_started(kind: str) -> None:
    one = task(kind, layout="dp=4", name="a-run", model="tiny", layers=2, seq=64, batch=8, steps=3)
    assert "--nproc" in task_words(one, base(), launched=False)
    assert "--nproc" not in task_words(one, base(), launched=True)


def test_both_starts_of_a_run_have_the_same_words() -> None:
    starts = [
        task("lose", layout="dp=4", name="lost", lost=3, start=start, limit=10.0 / (1 + start)) for start in (0, 1)
    ]
    first, second = (task_words(one, base(), launched=True) for one in starts)
    assert first == second
    assert task_env(starts[0]) == {"FIVEFOLD_FAULT": "kill@rank=3,step=5"}
    assert task_env(task("train")) == {}


def test_ranks_share_a_gpu_over_nccl_if_the_job_says_so() -> None:
    sharing = base("train.share_gpu=nccl")
    assert "train.share_gpu=nccl" in task_words(task("verify", sample=3), sharing, launched=False)
    assert "train.share_gpu=nccl" in task_words(task("doctor", layout="dp=4"), sharing, launched=False)
    words = task_words(task("calibrate"), sharing, launched=False)
    assert words[words.index("--share-gpu") + 1] == "nccl"
    assert "train.share_gpu=nccl" not in task_words(task("verify", sample=3, device="cpu"), sharing, launched=False)


def test_a_users_own_model_is_what_the_layouts_train() -> None:
    words = task_words(task("train", layout="dp=4", steps=3), base("model=tiny-gpt", "data.seq=64"), launched=False)
    assert words[1:3] == ["model=tiny-gpt", "data.seq=64"]
    assert "layout=dp=4" in words


@pytest.mark.parametrize(
    "told",
    [
        {"model": "os.path:join"}, {"layout": "dp=4,schedule=os.path:join"}, {"layout": "dp=4,schedule=evil.txt"},
        {"token": "../../etc"}, {"name": "../x"}, {"kind": "shell"}, {"words": ["rm"]}, {"port": 70_000},
    ],
)  # fmt: skip
def test_no_rank_runs_what_another_made_up(told: dict[str, object]) -> None:
    table = msgspec.to_builtins(task("train", layout="dp=4", model="tiny")) | told
    with pytest.raises((UserError, msgspec.ValidationError)):
        check_task(table)


def test_a_command_is_the_rank_that_its_starter_is() -> None:
    world = World(5, 16, 1, 4, True, Rendezvous(address="node1", port=29500), "Slurm step 7.0", 0)
    for start in (0, 1):
        env = rank_env(world, task("lose", name="lost", start=start, port=31000), number=3 + start)
        there = current_world({name: value for name, value in env.items() if value is not None})
        assert (there.rank, there.size, there.local_rank, there.local_size) == (5, 16, 1, 4)
        assert (str(there.meeting), there.start) == ("node1:31000", start)
        assert there.run == f"checkup {TOKEN} lost"  # so that the second start resumes what the first has begun


def test_who_is_named_is_found_in_what_was_said() -> None:
    end = CommandEnd(3, 1.0, "step 1/8  loss 5\n", (
        "error: step 5: rank 0 (dp 0): the gradient norm waited 0.0 s for rank 3 (world): the connection is closed\n"
        "rank 31 was ended by SIGKILL\nrank 3 (dp 3) was ended by SIGKILL in step 5\nlayout of rank 3\n"
    ))  # fmt: skip
    assert [line[:12] for line in sentences_about(3, [end, end])] == ["error: step ", "rank 3 (dp 3"]


@pytest.mark.slow
def test_a_rehearsal_on_two_ranks(tmp_path: Path) -> None:
    """The whole, over gloo: every part passes, and the judge reads its figures."""
    from tests.commands import fivefold

    words = ["checkup", "--minutes", "12", "--nproc", "2", "train.device=cpu", f"run.dir={tmp_path}/runs", "-o", "mine"]
    done = fivefold(*words, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "mine.json").read_text())
    assert report["ok"]
    assert [part["status"] for part in report["parts"]] == ["passed"] * 5
    assert all(run["measured"] for run in report["runs"])
    assert not (tmp_path / "runs").exists()
    assert fivefold("accuracy", "--data", "mine.json", cwd=tmp_path).returncode == 0
    planned = fivefold("plan", "tiny", "--cluster", "mine.toml", "--batch", "8", "--seq", "64", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr


@pytest.mark.slow
def test_ranks_of_a_launcher_do_it_together(tmp_path: Path) -> None:
    """torchrun's two ranks: one is killed in mid-run by the checkup, which goes on."""
    import subprocess

    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fivefold", "checkup"]
    words = ["--minutes", "10", "--skip", "machines,proofs,calibration,layouts", "train.device=cpu", "-o", "mine"]
    done = subprocess.run(
        [*command, *words, f"run.dir={tmp_path}/runs"], cwd=tmp_path, capture_output=True, text=True, timeout=700
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [lost] = [part for part in json.loads((tmp_path / "mine.json").read_text())["parts"] if part["name"] == "lost-rank"]
    assert lost["status"] == "passed"
    assert lost["data"]["losses"] == lost["data"]["undisturbed"]
