"""`fivefold bench checkpoint --recovery` measures what it says, on real ranks."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app

pytestmark = pytest.mark.alone


@pytest.mark.slow
def test_the_bench_goes_on_from_both_tiers_and_leaves_nothing(tmp_path: Path) -> None:
    words = [
        "bench",
        "checkpoint",
        "--recovery",
        "layout=dp=2,zero=1",
        "model.layers=1",
        "data.seq=16",
        "train.batch=2",
    ]
    done = CliRunner().invoke(app, [*words, "--rounds", "1", "--steps", "1", "--directory", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    for tier in ("memory", "disk"):
        assert set(found[tier]) == {"start", "load", "publish", "repeated"}
        assert all(seconds > 0 for seconds in found[tier].values())
    assert found["faster"] == found["disk"]["load"] / found["memory"]["load"]
    assert found["disk"]["repeated"] == 10 * found["memory"]["repeated"]  # every 100 steps, and every 10
    assert list(tmp_path.iterdir()) == []
    assert not list(Path("/dev/shm").glob("fivefold-bench-*"))
