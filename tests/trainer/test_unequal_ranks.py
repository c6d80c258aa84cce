"""A plan for ranks of unequal speed becomes a job that trains as it was planned."""

from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.job.reading import read_job
from fivefold.machines.result import RankSpeed, RanksResult, at_pace, speeds_to_toml
from fivefold.schedules.text import load
from fivefold.spec.presets import preset
from fivefold.trainer.result import TrainResult
from tests.commands import fivefold

SHORT = ["train.steps=2", "train.eval_samples=0", "checkpoint.save=false", "optimizer.warmup=1", "--nproc", "2"]


def test_the_planned_split_and_schedule_train_to_the_losses_of_an_even_one(tmp_path) -> None:
    cores = [at_pace(ACCELERATORS["CPU"], seconds, preset("small", layers=1), 1, 128) for seconds in (0.1, 0.2)]
    found = RanksResult([RankSpeed(rank, "here", "a CPU", [1.0 + rank] * 2, core) for rank, core in enumerate(cores)])
    (tmp_path / "ranks.toml").write_text(speeds_to_toml(found.cluster, []))
    words = "plan tiny --cluster ranks.toml --batch 8 --seq 32 --fix schedule=auto,microbatches=8 -o job.toml"
    planned = fivefold(*words.split(), cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    layout = read_job(tmp_path / "job.toml").layout
    assert layout.split[0] > layout.split[1]
    assert load(tmp_path / "job.schedule.txt").name == "auto"
    losses = []
    for changes in (["run.name=planned"], ["run.name=even", "layout=pp=2,microbatches=8"]):
        done = fivefold("train", "job.toml", *changes, *SHORT, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(TrainResult.read(tmp_path / "runs" / changes[0].partition("=")[2]).losses)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
