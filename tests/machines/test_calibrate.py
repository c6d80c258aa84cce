"""`fivefold calibrate` and `fivefold bench train --cases`: what they measure is what the planner reads."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.bench.steps import StepCase, cases, predicted, read
from fivefold.cli import app
from fivefold.cost.kernels import Device
from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.hardware.cluster import Cluster
from fivefold.machines.result import to_toml
from fivefold.support.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.alone
def test_a_calibrated_file_is_an_accelerator_of_a_cluster(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", "--quick", "--device", "cpu", "-o", "mine.toml", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    cluster = Cluster.parse("2x4xmine.toml")
    device = cluster.groups[0].accelerator
    assert (cluster.world, device.name) == (8, "CPU")
    assert device.achieved is not None
    assert device.achieved.source.startswith("measured by fivefold calibrate on a CPU")
    assert 0 < device.achieved.gemm <= 1.5
    assert device.inside.name == "measured"
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert found["accelerator"]["achieved"]["gemm"] == device.achieved.gemm
    assert {"gemm", "flash2", "stream", "launch", "host", "inside"} <= {row["what"] for row in found["rows"]}
    # The planner's formula with the file's constants gives a product that was measured, within a factor that noise on
    # a shared machine allows.
    largest = max(found["samples"]["products"], key=lambda one: one["m"] * one["n"] * one["k"])
    planned = Device.of(device).gemm(largest["m"], largest["n"], largest["k"], "fp32")
    assert 1 / 3 < planned / largest["seconds"] < 3


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("nowhere/mine.toml", "nowhere/mine.toml cannot be written: there is no directory nowhere"),
        ("mine.txt", "mine.txt should end in .toml"),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_measuring(file, sentence, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", "-o", file])
    assert isinstance(done.exception, UserError)
    assert str(done.exception) == sentence


def test_a_launchers_rank_is_told_to_run_alone(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    done = CliRunner().invoke(app, ["calibrate"])
    assert "run it without a launcher" in str(done.exception)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_accelerator_survives_its_file(name, tmp_path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(to_toml(ACCELERATORS[name], ["made by a test"]))
    assert Cluster.parse(str(path)).groups[0].accelerator == ACCELERATORS[name]


# The kept measurements


def test_the_kept_file_is_what_the_catalogue_says_of_an_h200() -> None:
    kept = Cluster.parse(str(ROOT / "benchmarks/h200.toml")).groups[0].accelerator
    assert kept.achieved == Device.of(ACCELERATORS["H200"]).achieved


def test_the_kept_steps_can_be_read() -> None:
    timed = read(ROOT / "benchmarks/h200-steps.csv")
    assert len(timed) >= 16
    assert all(one.seconds and one.memory and predicted(one.case, ACCELERATORS["H200"]) > 0 for one in timed)


# Steps


def test_alternatives_are_combined() -> None:
    assert cases("tiny") == [StepCase("tiny", 4)]
    found = cases("tiny,layers=1/2,seq=64,recompute=none/full")
    assert [(one.layers, one.seq, one.recompute) for one in found] == [
        (1, 64, "none"),
        (1, 64, "full"),
        (2, 64, "none"),
        (2, 64, "full"),
    ]


def test_bad_cases_are_refused_with_all_their_problems() -> None:
    with pytest.raises(UserError) as caught:
        cases("tiny,sequence=64,recompute=some,samples=0/x")
    assert caught.value.problems == [
        "tiny,sequence=64,recompute=some,samples=0/x: unknown key 'sequence'; did you mean 'seq'?",
        "tiny,sequence=64,recompute=some,samples=0/x: recompute='some' is not a choice; did you mean 'none'?",
        "tiny,sequence=64,recompute=some,samples=0/x: samples='0' must be a whole number of at least 1",
        "tiny,sequence=64,recompute=some,samples=0/x: samples='x' must be a whole number of at least 1",
    ]
    with pytest.raises(UserError, match="unknown model 'tinny'"):
        cases("tinny")


def test_steps_are_measured_and_kept(tmp_path) -> None:
    path = tmp_path / "steps.csv"
    words = ["tiny,layers=1,seq=16,microbatches=2", "--steps", "2", "--warm", "0", "--device", "cpu"]
    done = CliRunner().invoke(app, ["bench", "train", "--cases", *words, "-o", str(path), "--json"])
    assert done.exit_code == 0, done.output
    [one] = read(path)
    [row] = json.loads(done.stdout)
    assert one.case == StepCase("tiny", 1, 16, 1, 2)
    assert one.row == row
    assert one.seconds is not None
    assert 0 < one.seconds < 10
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# fivefold")
    assert len(list(csv.DictReader(lines[1:]))) == 1
