"""`python -m benchmarks.mixed`: all systems train the same, each row has its prediction. Not how fast they are."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import slow
from benchmarks.mixed import EVEN, SYSTEMS, MixedBenchResult, MixedRun, app, plans
from typer.testing import CliRunner

from fivefold.bench.comparison import base_job
from fivefold.bench.harness import Machine, RoundTimes
from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.machines.result import RankSpeed, RanksResult, at_pace
from fivefold.render.blocks import to_text
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError

TINY = [
    *("model.layers=6", "model.hidden=64", "model.heads=2", "model.kv_heads=2", "model.head_dim=32"),
    *("model.ffn=96", "model.vocab=256", "data.seq=32"),
]
BLOCK = (preset("small", layers=1), 1, 128)


def ranks(*seconds: float) -> RanksResult:
    cores = [at_pace(ACCELERATORS["CPU"], one, *BLOCK) for one in seconds]
    pairs = enumerate(zip(seconds, cores, strict=True))
    return RanksResult([RankSpeed(rank, "here", "a CPU", [one, one], core) for rank, (one, core) in pairs])


def planned(tmp_path: Path, *seconds: float, microbatches: int = 8):
    sizes = ["model.layers=16", "model.vocab=512", "data.seq=128", f"train.batch={microbatches}"]
    return plans(base_job(sizes, microbatches), ranks(*seconds), len(seconds), tmp_path / "auto.txt")


@pytest.fixture(scope="module")
def half_slow(tmp_path_factory):
    """The plans for two ranks of which each takes twice as long as one of the two others."""
    return planned(tmp_path_factory.mktemp("planned"), 0.1, 0.1, 0.2, 0.2)


@pytest.mark.parametrize("slower", [2.0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_slow_ranks_get_fewer_layers_and_plans_beat_the_even_split(slower, half_slow, tmp_path) -> None:
    found = half_slow if slower == 2.0 else planned(tmp_path, 0.1, 0.1, 0.1 * slower, 0.1 * slower)
    assert list(found) == list(SYSTEMS)
    assert all(sum(one.layers) == 16 for one in found.values())
    assert found[EVEN].layers == (4, 4, 4, 4)
    for name in ("1f1b", "zb-h1", "auto"):
        layers = found[name].layers
        assert min(layers[:2]) > max(layers[2:]), name
        assert found[name].seconds < found[EVEN].seconds
    assert found["auto"].seconds <= found["zb-h1"].seconds * (1 + 1e-9)  # which competes with its orders
    assert Path(found["auto"].layout.schedule).read_text().startswith("schedule auto")


def test_the_table_says_what_was_predicted_and_measured_in_80_columns(half_slow) -> None:
    found = half_slow
    times = RoundTimes({name: [4.0 - number / 4, 4.1 - number / 4] for number, name in enumerate(SYSTEMS)})
    losses = {name: [7.0, 6.5] for name in SYSTEMS}
    speeds = ranks(0.1, 0.1, 0.2, 0.2)
    one = MixedRun(2.0, speeds, found, times, losses)
    job, here = base_job(["train.batch=8"], 8), Machine(4, "2", "a machine")
    result = MixedBenchResult(job, 4, 2, here, (one,))
    text = to_text(result.blocks(), 80)
    assert result.ok
    assert "the losses of all 2 steps are the same in all systems" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    row = result.rows[-1]
    assert row["slower"] == pytest.approx(2.0)
    assert row["gain"] == pytest.approx((4 / 3 + 4.1 / 3.1) / 2)
    other = MixedRun(2.0, speeds, found, times, losses | {"auto": [7.0, 6.6]})
    assert not MixedBenchResult(job, 4, 2, here, (other,)).ok


@pytest.mark.slow
def test_every_system_trains_the_same_on_unequal_ranks(tmp_path) -> None:
    words = ["--ranks", "2", "--slow", "2", "--rounds", "1", "--microbatches", "4", "--quick"]
    path = tmp_path / "mixed.csv"
    done = CliRunner().invoke(app, [*words, *TINY, "-o", str(path), "--json"])
    assert done.exit_code == 0, done.output + str(done.exception)
    found = json.loads(done.stdout)
    assert found["agree"] is True
    assert [row["system"] for row in found["rows"]] == list(SYSTEMS)
    assert all(row[key] > 0 for row in found["rows"] for key in ("planned_seconds", "planned_gain", "seconds", "gain"))
    (run,) = found["runs"]
    assert len({tuple(losses) for losses in run["losses"].values()}) == 1  # to the bit
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert [row["system"] for row in csv.DictReader(lines[1:])] == list(SYSTEMS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--slow", "fast"], "--slow fast is no list of factors"),
        (["--slow", "0.5"], "--slow 0.5 must be a factor between 1.05 and 8"),
        (["--ranks", "1"], "--ranks 1 leaves nobody to be slower than; nearest: --ranks 2"),
        (["--ranks", "64"], "nearest"),
        (["-o", "mixed.txt"], "mixed.txt should end in .csv or .json"),
    ],
)
def test_what_cannot_be_is_refused_before_a_rank_starts(words, sentence) -> None:
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError)
    assert sentence in str(done.exception)


def test_a_process_that_was_slowed_is_never_left_standing() -> None:
    count = "n = 0\nfor line in iter(input, 'end'):\n    n += 1\n    print(n, flush=True)"
    with subprocess.Popen([sys.executable, "-c", count], stdin=-1, stdout=-1, text=True) as process:
        brake = subprocess.Popen([sys.executable, "-I", slow.__file__, str(process.pid), "2"])
        assert process.stdin is not None
        assert process.stdout is not None
        for wanted in (1, 2):  # slower, and alive
            process.stdin.write("\n")
            process.stdin.flush()
            assert int(process.stdout.readline()) == wanted
        brake.terminate()
        assert brake.wait(60) in (0, -15)  # before it began, it ends as any process
        process.stdin.write("\nend\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) == 3
        assert process.wait(60) == 0
    assert subprocess.run([sys.executable, "-I", slow.__file__, str(process.pid), "2"]).returncode == 0  # it is gone
