"""Unlike GPUs in one run: layers by speed and by each rank's own memory, every schedule, and the search over them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner, Result

from fivefold.cli import app
from fivefold.cost.peak_memory import USABLE_FRACTION
from fivefold.cost.step import Workload, estimate
from fivefold.hardware.cluster import Cluster
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.layout.stages import schedule_of
from fivefold.planner.explain import neighbours
from fivefold.planner.mixed import (
    divide_layers,
    fits_on_all_ranks,
    footprints,
    groups_of,
    hosts_in_rank_order,
    layers_of,
    merge_groups,
    refine_split,
)
from fivefold.planner.mixed_compare import SCHEDULES, compare, slow_accelerator, slow_half
from fivefold.planner.option import evaluate
from fivefold.planner.plan import plan, simulate
from fivefold.planner.search import search, trained_layout
from fivefold.schedules.check import prove
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError

SMALL = preset("llama3-8b", layers=8)


def run(line: str) -> Result:
    return CliRunner().invoke(app, line.split())


def mixed(line: str, cluster: str, batch: int = 8, seq: int = 2048, spec: ModelSpec = SMALL) -> Workload:
    layout, machines = Layout.parse(line), Cluster.parse(cluster)
    return Workload(spec, layout, machines, seq, batch, groups=groups_of(machines, layout))


def every_split(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(layers + stages - 1), stages - 1):
        yield tuple(after - before - 1 for before, after in pairwise((-1, *cuts, layers + stages - 1)))


@pytest.mark.parametrize(
    ("schedule", "cluster"),
    [
        ("1f1b", "2xH100+2xA100"),
        ("1f1b", "1xA100+1xH100+1xRTX4090"),
        ("zb-h1", "3xA100+1xH100"),
        ("interleaved", "1xA100+1xH100"),
        ("zb-v", "1xH100+1xA100"),
    ],
)
def test_the_split_is_the_best_of_all(schedule: str, cluster: str) -> None:
    """Every split of six layers that fits is simulated."""
    spec = preset("llama3-8b", layers=6)
    workload = mixed(f"pp={Cluster.parse(cluster).world},schedule={schedule},microbatches=8", cluster, spec=spec)
    found = refine_split(divide_layers(workload))
    each = (structs.replace(workload.layout, split=split) for split in every_split(6, workload.layout.stages))
    best = min(estimate(one).seconds for layout in each if fits_on_all_ranks(one := replace(workload, layout=layout)))
    assert fits_on_all_ranks(found)
    assert estimate(found).seconds == pytest.approx(best, rel=1e-9)


def test_a_rank_that_would_not_fit_gives_layers_to_the_others() -> None:
    whole = preset("llama3-8b")
    roomy = divide_layers(mixed("pp=4,microbatches=16,recompute=full", "2xH100+2xA100", 16, 8192, whole))
    tight = divide_layers(mixed("pp=4,microbatches=16", "2xH100+2xA100", 16, 8192, whole))
    assert min(layers_of(roomy)[:2]) > max(layers_of(roomy)[2:])  # by speed
    assert layers_of(tight)[0] < layers_of(roomy)[0]  # rank 0 holds four microbatches of all that a block keeps
    for rank, needs in enumerate(footprints(tight)):
        assert needs.total <= USABLE_FRACTION * tight.device_memory_of(rank)


def test_each_rank_is_held_against_its_own_device() -> None:
    workload = divide_layers(mixed("pp=2,microbatches=4,recompute=full", "1xH100+1xRTX4090", 4))
    assert [workload.device_memory_of(rank) for rank in (0, 1)] == [
        one.accelerator.memory for one in workload.cluster.groups
    ]
    option = evaluate(workload)
    shares = [needs.total / workload.device_memory_of(rank) for rank, needs in enumerate(footprints(workload))]
    assert option.footprint.rank == shares.index(max(shares))
    assert option.device_memory == workload.device_memory_of(option.footprint.rank)
    swapped = replace(workload, cluster=Cluster(workload.cluster.groups[::-1]))
    assert not evaluate(swapped).fits  # the larger half on the smaller device
    assert option.fits


@pytest.mark.parametrize("cluster", ["2xH100+2xA100", "2xA100+2xH100"])
@pytest.mark.parametrize("layers", ["", ",split=4,2,1,1", ",split=1,1,3,3"])
def test_auto_is_never_slower_than_1f1b_with_the_same_split(cluster: str, layers: str) -> None:
    for more in ("pp=4", "pp=4,recompute=full"):
        plain = mixed(f"{more},microbatches=8{layers}", cluster)
        made = replace(plain, layout=structs.replace(plain.layout, schedule="auto"))
        assert estimate(made).seconds <= estimate(plain).seconds * (1 + 1e-9)


def test_auto_with_tp_keeps_whole_backward_passes_where_halves_cost_more() -> None:
    """tp hides its collectives behind the weights' gradients, which a schedule that puts them off takes from it."""
    plain = mixed("tp=8,pp=4,sp,microbatches=64", "2x8xH100+2x8xA100", 64, 8192)
    made = replace(plain, layout=structs.replace(plain.layout, schedule="auto"))
    assert not made.splits_backward
    assert estimate(made).seconds == pytest.approx(estimate(plain).seconds)
    assert footprints(made)[0].total == pytest.approx(footprints(plain)[0].total, rel=0.02)


@pytest.mark.parametrize(
    "name", [name for name, record in CATALOGUE.items() if record.planned or record.uses_stage_times]
)
def test_every_schedule_is_planned_over_unlike_nodes(name: str) -> None:
    workload = Workload(SMALL, Layout(), Cluster.parse("2xH100+2xA100"), 2048, 16)
    found = search(workload, top=3, schedule=name, tp=1, cp=1, recompute="selective")
    for option in found.options:
        layout = option.layout
        assert layout.schedule == name
        assert len(layout.split) == layout.stages
        assert not layout.problems(SMALL, world=4, seq=2048, batch=16)
        assert option.fits
        prove(option.workload.schedule())


def test_two_groups_of_one_device_are_one() -> None:
    one, two = (
        search(Workload(SMALL, Layout(), Cluster.parse(text), 2048, 16), top=3)
        for text in ("2x2xH100", "2xH100+2xH100")
    )
    assert [option.layout for option in one.options] == [option.layout for option in two.options]
    assert [option.seconds for option in one.options] == [option.seconds for option in two.options]
    apart = merge_groups(Cluster.parse("8xH100+8xA100+8xH100+8xA100"))
    assert apart == Cluster.parse("2x8xH100+2x8xA100")


def test_groups_that_are_equally_fast_take_equal_layers() -> None:
    """Unlike in name only: the time is that of like nodes."""
    machines = slow_half(Cluster.parse("4x1xH100"), 1.0)
    assert len(machines.groups) == 2
    layout = Layout.parse("pp=4,microbatches=8,split=2,2,2,2")
    unlike = Workload(SMALL, layout, machines, 2048, 8, groups=groups_of(machines, layout))
    alike = Workload(SMALL, layout, Cluster.parse("4x1xH100"), 2048, 8)
    assert estimate(unlike).seconds == pytest.approx(estimate(alike).seconds)
    assert estimate(refine_split(divide_layers(unlike))).seconds <= estimate(alike).seconds


def test_the_order_of_the_groups_is_a_choice() -> None:
    """The job's cluster has its nodes in the order in which hosts are numbered: replica by replica."""
    found = plan(
        "llama3-8b", "2x8xH100+2x8xA100", batch=32, fix="dp=2,tp=4,zero=1,schedule=1f1b,recompute=none", seq=4096
    )
    orders = {str(option.workload.cluster) for option in found.options}
    assert orders <= {"2x8xH100+2x8xA100-80", "2x8xA100-80+2x8xH100"}
    first, then = (group.accelerator.name for group in found.chosen.workload.cluster.groups)
    names = {"H100": "8xH100", "A100-80": "8xA100"}
    assert found.job.run.cluster == "+".join([names[first], names[then]] * 2)
    again = simulate(found.job.model, found.layout, found.job.run.cluster, batch=32, seq=4096)
    assert again.option.seconds == found.chosen.seconds


def test_hosts_keep_the_names_that_the_user_gave(tmp_path: Path) -> None:
    cluster = Cluster.parse("4x8xH100+2x4xA100")
    assert hosts_in_rank_order(cluster, 1, "4x8xh100+2x4xA100") == "4x8xh100+2x4xA100"
    assert hosts_in_rank_order(cluster, 2, "4x8xh100+2x4xA100") == "2x8xh100+4xA100+2x8xh100+4xA100"
    assert hosts_in_rank_order(cluster, 2, str(tmp_path / "tables.toml")) == str(tmp_path / "tables.toml")


def test_the_planned_job_trains_with_the_very_schedule(tmp_path: Path) -> None:
    output = tmp_path / "job.toml"
    line = "plan llama3-8b model.layers=8 --cluster 2xH100+2xA100 --batch 8 --seq 2048 --fix tp=1,cp=1,schedule=auto"
    said = run(f"{line} -o {output}").output
    assert f"with its schedule in {tmp_path / 'job.schedule.txt'}" in said
    job = read_job(output)
    assert job.layout.schedule == str(tmp_path / "job.schedule.txt")
    cluster = Cluster.parse(job.run.cluster)
    layout = structs.replace(job.layout, schedule="auto", chunks=1)
    planned = Workload(job.model, layout, cluster, 2048, 8, groups=groups_of(cluster, layout))
    assert schedule_of(job.model, job.layout, job.data.seq) == planned.schedule()
    assert trained_layout(evaluate(planned), tmp_path / "again.txt").record.schedule == planned.schedule()


def test_neighbours_divide_the_layers_anew_and_name_the_even_split() -> None:
    workload = divide_layers(mixed("tp=2,pp=4,sp,microbatches=8,recompute=full", "4xH100+4xA100"))
    found = {one.change: one for one in neighbours(evaluate(workload))}
    assert found["even layers"].slower > 0.2  # type: ignore[operator]
    assert len(found["schedule=zb-v"].layout.split) == 8
    assert found["schedule=auto"].slower <= 1e-9  # type: ignore[operator]
    assert "a replica takes whole nodes" in found["pp=2"].sentence
    even = evaluate(mixed("tp=2,pp=4,sp,microbatches=8,recompute=full", "4xH100+4xA100"))
    assert {one.change: one for one in neighbours(even)}["layers by speed"].slower < -0.2  # type: ignore[operator]


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"dp": 2}, "gives each of its 2 replicas 4 of the 8 GPUs of a node .* nearest: dp=1, with more"),
        ({"tp": 8, "cp": 2}, "does not span the mixed nodes"),
        ({"schedule": "gpipe"}, "schedule=gpipe is not searched with fivefold"),
        ({"pp": 3}, "take 3 ranks, which does not divide the 16 GPUs"),
    ],
)
def test_what_cannot_span_the_groups_is_said(fixed: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        search(Workload(preset("llama3-8b"), Layout(), Cluster.parse("8xH100+8xA100"), 8192, 64), **fixed)


def test_schedules_are_compared_on_slower_halves() -> None:
    found = compare(SMALL, "4xH100", layout="pp=4,microbatches=8", batch=8, seq=2048, slower=(1.5,))
    rows = {(row.schedule, row.split): row for row in found.rows if row.slower == 1.5}
    assert set(rows) == {(name, split) for name in SCHEDULES for split in ("even", "speed")}
    assert rows["1f1b", "even"].gain == 0
    assert rows["1f1b", "speed"].gain > 0
    assert rows["auto", "speed"].seconds <= rows["1f1b", "speed"].seconds * (1 + 1e-9)
    assert all(0 <= row.idle < 1 for row in rows.values())
    assert found.to_dict()["rows"][0]["predicted_seconds"] == found.rows[0].seconds


def test_a_slower_device_takes_that_much_longer() -> None:
    group = Cluster.parse("2xCPU").groups[0]
    slow = structs.replace(group, accelerator=slow_accelerator(group.accelerator, 2.0))
    fast, twice = (
        Workload(preset("tiny"), Layout(pp=2, microbatches=4), Cluster((one,)), 128, 4, "fp32").block_cost.block
        for one in (group, slow)
    )
    assert twice.forward.gemm == pytest.approx(2 * fast.forward.gemm)
    assert twice.forward.memory == pytest.approx(2 * fast.forward.memory)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "compare mixed llama3-8b --cluster 8xH100",
            "devices of one kind; give several, or how much slower half of them",
        ),
        ("compare mixed llama3-8b --cluster 8xH100+8xA100 --slower 2", "is mixed as it is"),
        ("compare mixed llama3-8b --cluster 8xH100 --slower x", "--slower x is not a list of numbers"),
        ("compare mixed llama3-8b --cluster 8xH100 --slower 0.5", "slower=0.5 must be at least 1"),
        ("compare mixed llama3-8b --cluster 8xH100+8xA100 --layout dp=2,tp=8 --batch 64", "one pipeline stage"),
    ],
)
def test_what_cannot_be_compared_is_said(line: str, words: str) -> None:
    found = run(line).exception
    assert isinstance(found, UserError)
    assert words in str(found)
