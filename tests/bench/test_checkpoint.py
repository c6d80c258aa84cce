"""`fivefold bench checkpoint` measures what it says, on real ranks, and leaves nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fivefold.cli import app

pytestmark = pytest.mark.alone


def measured(directory: Path, *words: str) -> Any:
    job = ["layout=dp=2,zero=1", "model.layers=1", "data.seq=16", "train.batch=2"]
    few = ["--rounds", "1", "--steps", "1", "--directory", str(directory), "--json"]
    done = CliRunner().invoke(app, ["bench", "checkpoint", *words, *job, *few])
    assert done.exit_code == 0, done.output
    assert list(directory.iterdir()) == []
    return json.loads(done.stdout)


def test_the_bench_measures_every_system_on_two_ranks(tmp_path: Path) -> None:
    result = measured(tmp_path)
    parameters = 3 * 4 * (257 * 128 * 2 + 128 + 2 * 128 + 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384)
    assert result["bytes"] == parameters  # each element of weights and moments once, over both ranks
    assert result["layout"] == "dp=2,zero=1"
    for way in ("save", "load"):
        assert set(result[way]) == {"ours", "dcp", "torch"}
        assert all(value > 0 for value in result[way].values())
    assert 0 < result["snapshot"] < result["lost"] + result["step"]


@pytest.mark.slow
def test_a_recovery_goes_on_from_both_tiers(tmp_path: Path) -> None:
    result = measured(tmp_path, "--recovery")
    for tier in ("memory", "disk"):
        assert set(result[tier]) == {"start", "load", "publish", "repeated"}
        assert all(seconds > 0 for seconds in result[tier].values())
    assert result["faster"] == result["disk"]["load"] / result["memory"]["load"]
    assert result["disk"]["repeated"] == 10 * result["memory"]["repeated"]  # every 100 steps, and every 10
    assert not list(Path("/dev/shm").glob("fivefold-bench-*"))
