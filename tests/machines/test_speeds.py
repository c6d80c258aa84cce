"""`fivefold calibrate --ranks`: which ranks are slow, and the cluster that the planner reads of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.cost.block import BlockCost
from fivefold.cost.collective_time import Topology
from fivefold.cost.kernels import Device
from fivefold.cost.software import ON_CPUS
from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.machines import calibrate
from fivefold.machines.result import (
    MAX_TOLERANCE,
    MIN_TOLERANCE,
    RankSpeed,
    RanksResult,
    at_pace,
    classes,
    speeds_to_toml,
    tolerance,
)
from fivefold.render.blocks import to_text
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from tests.machines.made import little_rank_speed

CPU = ACCELERATORS["CPU"]


def speeds(*seconds: float, nodes: str = "") -> list[RankSpeed]:
    """Of each rank a core whose bandwidth tells which rank it was measured on."""
    return [
        RankSpeed(rank, (nodes or "n" * len(seconds))[rank], "a CPU", [one, one * 1.01], core(rank))
        for rank, one in enumerate(seconds)
    ]


def core(rank: int):
    return structs.replace(CPU, memory_bandwidth=1e9 + rank)


def test_ranks_that_agree_within_the_noise_are_of_one_class() -> None:
    found = classes([[1.00, 1.02], [1.98, 2.02], [0.99, 1.03], [2.05, 2.01]])
    assert [one.ranks for one in found] == [(0, 2), (1, 3)]
    assert [round(one.slower, 2) for one in found] == [1.0, 2.0]


def test_noise_is_what_the_rounds_of_the_usual_rank_say_within_bounds() -> None:
    assert tolerance([[1.0, 1.0], [1.0, 1.0]]) == MIN_TOLERANCE
    assert tolerance([[1.0, 1.1], [1.0, 1.1]]) == pytest.approx(0.1)
    assert tolerance([[1.0, 9.0], [1.0, 9.0]]) == MAX_TOLERANCE
    # Each is near its neighbour, and the last is not near the first: a class does not creep.
    assert [one.ranks for one in classes([[1.0, 1.0], [1.04, 1.04], [1.08, 1.08]])] == [(0, 1), (2,)]


def test_neighbours_of_one_speed_are_a_group_and_ranks_keep_their_order() -> None:
    found = RanksResult(speeds(1.0, 1.0, 1.5, 1.5)).cluster
    assert [(group.nodes, group.gpus) for group in found.groups] == [(1, 2), (1, 2)]
    turns = RanksResult(speeds(1.0, 2.0, 1.0, 2.0)).cluster
    assert [group.gpus for group in turns.groups] == [1, 1, 1, 1]
    assert turns.groups[0] == turns.groups[2] != turns.groups[1]
    assert turns.groups[1].accelerator == core(1)  # the median one of ranks 1 and 3


def test_groups_have_the_nodes_on_which_their_ranks_are() -> None:
    found = RanksResult(speeds(*[1.0] * 4, *[2.0] * 4, nodes="aabbccdd")).cluster
    assert [(group.nodes, group.gpus) for group in found.groups] == [(2, 2), (2, 2)]
    uneven = RanksResult(speeds(*[1.0] * 3, *[2.0], nodes="aabb")).cluster
    assert [(group.nodes, group.gpus) for group in uneven.groups] == [(1, 2), (1, 1), (1, 1)]


def test_the_slow_ranks_are_named_with_their_factor() -> None:
    text = to_text(RanksResult(speeds(1.0, 1.0, 2.0, 1.5)).blocks(), 80)
    assert "1.50 times as long on rank 3, 2.00 times as long on rank 2" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "all have one speed" in RanksResult(speeds(1.0, 1.0)).sentence


def test_a_cluster_survives_its_file(tmp_path) -> None:
    found = RanksResult(speeds(1.0, 1.0, 1.5, 1.5)).cluster
    path = tmp_path / "ranks.toml"
    path.write_text(speeds_to_toml(found, ["made by a test"]))
    assert Cluster.read(path) == found
    mixed = Cluster.parse("2x8xH100+1x4xA100")
    path.write_text(speeds_to_toml(mixed, []))
    assert Cluster.read(path) == mixed


@pytest.mark.parametrize("seconds", [0.01, 0.3])
def test_a_core_is_set_to_the_pace_that_its_block_had(seconds) -> None:
    spec, samples, seq = preset("small", layers=1), 1, 128
    device = Device.of(at_pace(CPU, seconds, spec, samples, seq))
    work = BlockCost(
        spec=spec,
        layer=spec.kinds(0),
        layout=Layout(),
        device=device,
        topology=Topology(device, 1, Layout()),
        software=ON_CPUS.computing_in("fp32"),
        samples=samples,
        seq=seq,
        precision="fp32",
    )
    rates = sum(part.gemm + part.attention + part.memory for part in work.block)
    before = Device.of(CPU)
    assert device.accelerator.memory_bandwidth / CPU.memory_bandwidth == pytest.approx(
        device.rate("fp32") / before.rate("fp32"), rel=1e-3
    )
    assert 0 < rates <= seconds * 1.01


def test_ranks_are_measured_at_once_and_written_for_the_planner(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, little = calibrate.processes.run, f"{little_rank_speed.__module__}:{little_rank_speed.__name__}"
    monkeypatch.setattr(calibrate.processes, "run", lambda size, _, *more, **limit: run(size, little, *more, **limit))
    words = ["calibrate", "--ranks", "--nproc", "2", "--quick", "--device", "cpu", "-o", "ranks.toml", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output + str(done.exception)
    found = json.loads(done.stdout)
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert all(second > 0 for one in found["ranks"] for second in one["seconds"])
    assert sorted(rank for one in found["classes"] for rank in one["ranks"]) == [0, 1]
    cluster = Cluster.read(Path("ranks.toml"))
    assert (cluster.world, cluster.to_dict()) == (2, found["cluster"])
    device = cluster.groups[0].accelerator
    assert (device.name, device.inside.name) == ("CPU", "measured")
    assert device.across == device.inside
    planned = CliRunner().invoke(
        app, ["plan", "tiny", "--layout", "pp=2,microbatches=4", "--batch", "4", "--seq", "64", "-c", "ranks.toml"]
    )
    assert planned.exit_code == 0, planned.output + str(planned.exception)


@pytest.mark.slow
def test_ranks_of_a_launcher_are_measured_too(tmp_path) -> None:
    words = "torch.distributed.run --nproc-per-node 2 -m fivefold calibrate --ranks --quick --device cpu -o ranks.toml"
    done = subprocess.run([sys.executable, "-m", *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to ranks.toml") == 1  # by rank 0 alone
    assert Cluster.read(tmp_path / "ranks.toml").world == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nproc", "2"], "--nproc 2 is for --ranks"),
        (["--ranks", "--nproc", "0"], "nproc=0 must be at least 1"),
        (["--ranks", "-o", "ranks.txt"], "ranks.txt should end in .toml"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, sentence, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", *words])
    assert isinstance(done.exception, UserError)
    assert sentence in str(done.exception)
