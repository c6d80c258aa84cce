"""Checkpoints of version 1, which DCP wrote, are read as before: looked at, verified, resumed, spoken with."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.checkpoint.find import find
from fivefold.cli import app
from tests.checkpoint.old import MODEL, STATE, unpack
from tests.checkpoint.runs import gathered, loaded, small_job, train
from tests.ranks import run_ranks


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return unpack(tmp_path / "old")


def here(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_it_is_listed_verified_and_shown(old: Path) -> None:
    assert [row["complete"] for row in json.loads(here("checkpoint", "ls", old, "--json"))["checkpoints"]] == [True]
    assert json.loads(here("checkpoint", "ls", "--verify", old, "--json"))["sound"]
    shown = json.loads(here("inspect", old, "--json"))["checkpoint"]
    assert (shown["version"], shown["step"], len(shown["tensors"])) == (1, 2, len(STATE))
    embedding = next(row for row in shown["tensors"] if row["name"] == "model.embedding.weight")
    assert embedding == {"name": "model.embedding.weight", "shape": [257, 4], "dtype": "float32", "pieces": 2}


@pytest.mark.parametrize("layout", ["dp=1", "tp=2,sp", "dp=2,zero=3"])
def test_its_state_is_read_to_the_bit_in_other_layouts(tokens: Path, old: Path, layout: str) -> None:
    settings = [*MODEL, f"layout={layout}", "model.kv_heads=1"]
    job = small_job(tokens, *settings, "train.steps=2")
    read = run_ranks(job.layout.world, loaded, job, old / "checkpoints")
    assert {step for step, _, _ in read} == {2}
    assert gathered([state for _, state, _ in read]) == STATE


def test_a_run_goes_on_from_it_and_saves_in_the_present_format(tokens: Path, old: Path) -> None:
    job = small_job(tokens, *MODEL, "layout=pp=1,dp=2", "train.steps=4")
    losses, _, samples = run_ranks(2, train, job, old / "checkpoints")[0]
    assert sorted(losses) == [3, 4]
    assert samples == list(range(8, 16))
    assert find(old).manifest.version == 2


def test_it_says_and_exports_what_its_copy_in_the_present_format_does(old: Path, tmp_path: Path) -> None:
    here("checkpoint", "reshard", old, "--layout", "tp=2", "-o", tmp_path / "new")
    assert find(tmp_path / "new").manifest.version == 2
    said = [here("generate", run, "--tokens", "72,101", "-n", "6", "--json") for run in (old, tmp_path / "new")]
    assert said[0] == said[1]
    for run in ("old", "new"):
        here("hf", "export", tmp_path / run, "-o", tmp_path / f"{run}-hf")
    first, second = ((tmp_path / f"{run}-hf" / "model.safetensors").read_bytes() for run in ("old", "new"))
    assert first == second
