"""A run that is started again goes on in its own directory, whoever starts it and whatever else has its name."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from fivefold.checkpoint.manifest import MANIFEST
from fivefold.job.config import Job, TrainConfig
from fivefold.job.reading import read_job
from fivefold.launch.world import PLANNED_ENV, RESTARTS_ENV, RUN_ID_ENV
from fivefold.support.errors import UserError
from fivefold.trainer.directories import earlier_directory, lock_directory, run_directory
from fivefold.trainer.run_names import RUN_NAMES_FILE, launcher_names, read_run_names, write_run_names
from tests.commands import fivefold
from tests.trainer.test_ends import FAST


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return named(tmp_path)


def named(parent: Path, *changes: str) -> Job:
    return read_job(None, [f"run.dir={parent}", "run.name=sn", *changes])


def torchrun(run: str, restarts: int = 0) -> dict[str, str]:
    return {RUN_ID_ENV: run, RESTARTS_ENV: str(restarts)}


def slurm(job: int, restarts: int = 0, step: int | None = 0) -> dict[str, str]:
    env = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": str(restarts)}
    return {name: value for name, value in env.items() if value != "None"}


def start(job: Job, env: Mapping[str, str], fresh: bool = False, saves: bool = True) -> str:
    """The name of the directory in which a start trains, and as a rule leaves a checkpoint."""
    directory = run_directory(job, fresh=fresh, env=env)
    if saves:
        step = directory / "checkpoints/step-00000001"
        step.mkdir(parents=True, exist_ok=True)
        (step / MANIFEST).write_text("")
    return directory.name


A, B, BATCH = "train.seed=1", "train.seed=2", {"step": None}
ELASTIC = torchrun("seven") | {PLANNED_ENV: "0.1"}
# Starts one after the other: a setting of the job, the launcher's words, how, and the name of the directory.
Story = list[tuple[str, dict[str, str], str, str]]
STORIES: dict[str, Story] = {
    "a command by hand resumes the newest, and fresh makes a new one": [
        ("", {}, "", "sn"), ("", {}, "", "sn"), ("", {}, "fresh", "sn-2"), ("", {}, "", "sn-2"),
    ],
    **{
        f"a restart goes on in its own directory {launcher.__name__} {how}": [
            ("", launcher(7), how, "sn"), ("", launcher(8), "fresh", "sn-2"),
            ("", launcher(7, 1), how, "sn"), ("", launcher(8, 3), how, "sn-2"),
        ]
        for launcher in (torchrun, slurm) for how in ("", "fresh")
    },
    **{
        f"a restart before the first checkpoint goes on there, too {launcher.__name__}": [
            ("", launcher(7), "unsaved", "sn"), ("", launcher(7, 1), "", "sn"),
        ]
        for launcher in (torchrun, slurm)
    },
    "an elastic run goes on in its own directory also where its launcher counts no start": [
        ("", ELASTIC, "fresh", "sn"), ("", {}, "fresh", "sn-2"),
        ("", ELASTIC, "fresh", "sn"),  # other members: torchrun's count stays 0
        ("", torchrun("none") | {PLANNED_ENV: "0.1"}, "fresh", "sn-3"),  # a name that all runs have
    ],
    "a restart by name never takes the directory of another run": [
        # A is at step 150 when B of the same name and launcher's word comes; then A is started again.
        (A, torchrun("none"), "", "sn"), (B, torchrun("none"), "fresh", "sn-2"),
        (A, torchrun("none", 1), "", "sn"), (B, torchrun("none", 1), "", "sn-2"),
    ],
    "two commands of one slurm job stay apart, in another layout too": [
        (A, slurm(7, **BATCH), "fresh", "sn"), (B, slurm(7, **BATCH), "fresh", "sn-2"),
        (f"{A} layout=dp=2", slurm(7, 1, **BATCH), "fresh", "sn"), (B, slurm(7, 1, **BATCH), "fresh", "sn-2"),
    ],
    "a requeued job goes on where its inner launcher has another name": [
        ("", slurm(7) | torchrun("first"), "fresh", "sn"), ("", {}, "fresh", "sn-2"),
        ("", slurm(7, 1) | torchrun("second"), "fresh", "sn"), ("", torchrun("second", 1), "", "sn"),
    ],
    "a run that resumed another's directory by hand has it from then on": [
        ("", {}, "", "sn"), ("", torchrun("a"), "", "sn"), ("", {}, "fresh", "sn-2"), ("", torchrun("a", 1), "", "sn"),
    ],
    "a run whose first start made no directory begins as a first start does": [
        ("", torchrun("a", 1), "", "sn"), ("", torchrun("b", 1), "", "sn"), ("", torchrun("c", 1), "fresh", "sn-2"),
    ],
    "but not in the directory of another job": [
        ("", {}, "", "sn"), (B, {}, "fresh", "sn-2"),
        ("train.seed=7", slurm(99, 1), "", "sn-3"), ("", slurm(98, 1), "", "sn"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_a_run_goes_on_in_its_own_directory(tmp_path: Path, story: str) -> None:
    for number, (change, env, how, name) in enumerate(STORIES[story]):
        job = named(tmp_path, *change.split())
        assert start(job, env, fresh=how == "fresh", saves=how != "unsaved") == name, f"start {number}"


def test_a_command_that_the_newest_refuses_has_an_earlier_one_of_the_same_job(job: Job, tmp_path: Path) -> None:
    other = named(tmp_path, "train.seed=2")
    assert [start(job, {}), start(job, {}, fresh=True, saves=False)] == ["sn", "sn-2"]
    assert start(other, {}, fresh=True) == "sn-3"
    assert earlier_directory(job, tmp_path / "sn-3", {}) == tmp_path / "sn"  # sn-2 has no checkpoint
    assert earlier_directory(other, tmp_path / "sn-3", {}) is None
    assert earlier_directory(job, tmp_path / "sn-3", torchrun("a")) == tmp_path / "sn"
    assert earlier_directory(job, tmp_path / "sn-3", torchrun("a", 1)) is None  # a restart never moves


def test_damage_to_the_names_of_runs_stops_a_restart_and_no_command_by_hand(job: Job, tmp_path: Path) -> None:
    assert start(job, torchrun("a")) == "sn"
    assert start(job, torchrun("b"), fresh=True) == "sn-2"
    file = tmp_path / "sn" / RUN_NAMES_FILE
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 3):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        with suppress(UserError):  # as a rule; a bit of white space changes nothing
            assert run_directory(job, fresh=False, env=torchrun("a", 1)).name == "sn"
            file.write_bytes(whole)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match="cannot be told"):
        run_directory(job, fresh=False, env=torchrun("a", 1))
    assert run_directory(job, fresh=False, env=torchrun("b", 1)).name == "sn-2"
    assert start(job, {}) == "sn-2"


def test_a_directory_remembers_the_last_runs(tmp_path: Path) -> None:
    write_run_names(tmp_path, [f"run {number}" for number in (*range(100), 50)])
    found = read_run_names(tmp_path)
    assert found is not None
    assert (len(found), found[-2:]) == (64, ["run 99", "run 50"])


def test_pipes_in_the_place_of_its_files_stop_a_run_at_once(job: Job, tmp_path: Path) -> None:
    for name in ("claim", f"{RUN_NAMES_FILE}.half"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"cannot write .*claim: .*are free there"):
        lock_directory(tmp_path)
    write_run_names(tmp_path, ["a"])
    assert read_run_names(tmp_path) == ["a"]
    os.close(os.open(tmp_path / RUN_NAMES_FILE, os.O_RDONLY))


def test_a_requeued_run_goes_on_where_it_was_killed(tokens: Path, tmp_path: Path) -> None:
    words = ["train", f"data.path={tokens}", *FAST, "--fresh", "train.steps=4", "checkpoint.every=1"]
    batch = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "0"}
    killed = fivefold(*words, cwd=tmp_path, env=batch | {"FIVEFOLD_FAULT": "term@step=2"})
    assert killed.returncode == 143
    other = fivefold(*words, "train.seed=2", cwd=tmp_path)
    assert other.returncode == 0
    on = fivefold(*words, cwd=tmp_path, env=batch | {"SLURM_RESTART_COUNT": "1"})
    assert on.returncode == 0, on.stderr
    assert "resumes from runs/run/checkpoints/step-00000002, after step 2" in on.stdout


def test_a_run_is_known_by_what_was_given_so_that_a_new_setting_with_a_default_changes_nothing() -> None:
    job = read_job(None, ["optimizer.lr=1e-4"])
    [name] = launcher_names(job, {"SLURM_JOB_ID": "7"})

    class Wider(TrainConfig, frozen=True, kw_only=True):
        new: int = 3

    [same] = launcher_names(msgspec.structs.replace(job, train=Wider()), {"SLURM_JOB_ID": "7"})
    [other] = launcher_names(msgspec.structs.replace(job, train=Wider(new=4)), {"SLURM_JOB_ID": "7"})
    assert name == same != other
