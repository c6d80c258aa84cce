"""`fivefold bench checkpoint` measures what it says, on real ranks."""

import json

import pytest
from typer.testing import CliRunner

from fivefold.cli import app

pytestmark = pytest.mark.alone


def test_the_bench_measures_every_system_on_two_ranks(tmp_path) -> None:
    words = ["bench", "checkpoint", "layout=dp=2,zero=1", "model.layers=1", "data.seq=16", "train.batch=2"]
    done = CliRunner().invoke(app, [*words, "--rounds", "1", "--steps", "1", "--directory", str(tmp_path), "--json"])
    found = json.loads(done.stdout)
    parameters = 3 * 4 * (257 * 128 * 2 + 128 + 2 * 128 + 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384)
    assert found["bytes"] == parameters  # each element of weights and moments once, over both ranks
    assert found["layout"] == "dp=2,zero=1"
    for way in ("save", "load"):
        assert set(found[way]) == {"ours", "dcp", "torch"}
        assert all(value > 0 for value in found[way].values())
    assert 0 < found["snapshot"] < found["lost"] + found["step"]
    assert list(tmp_path.iterdir()) == []
