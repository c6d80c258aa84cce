"""What a plan says that a rank sends: whose traffic it is, by which links it goes, and experts' under their name."""

from dataclasses import replace

import pytest

from fivefold.cost.step import Workload
from fivefold.cost.traffic import display_axis, expected_traffic
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.planner.explain import AxisTraffic, difference, neighbours, traffic, traffic_rank
from fivefold.planner.option import Option, evaluate
from fivefold.planner.plan import simulate
from fivefold.spec.presets import preset


def option(model: str, layout: str, cluster: str, batch: int, seq: int = 4096) -> Option:
    return evaluate(Workload(preset(model), Layout.parse(layout), Cluster.parse(cluster), seq, batch, imbalance=1.6))


def sent(one: Option) -> dict[tuple[str, str], AxisTraffic]:
    return {(row.axis, row.kind): row for row in traffic(one)}


@pytest.mark.parametrize(("ep", "far"), [(32, 24 / 31), (16, 8 / 15), (8, 0.0)])
def test_an_all_to_all_goes_to_every_rank_alike(ep: int, far: float) -> None:
    """Of 31 others 24 are on other nodes, where a ring would have one rank of 8 send to them."""
    found = sent(option("qwen3-30b-a3b", f"dp=32,ep={ep},zero=1,recompute=full,microbatches=8", "4x8xH100", 256))
    row = found["ep", "all-to-all"]
    assert row.inside + row.across == pytest.approx(row.payload * (ep - 1) / ep)
    assert row.across == pytest.approx(far * (row.inside + row.across))
    ring = found["dp", "all-gather"]
    assert ring.across == pytest.approx((ring.inside + ring.across) / 8)


def test_the_bytes_between_nodes_are_those_of_the_time() -> None:
    one = option("qwen3-30b-a3b", "dp=32,ep=32,zero=1,recompute=full,microbatches=8", "4x8xH100", 256)
    row, card = sent(one)["ep", "all-to-all"], one.workload.first_device
    across = row.across / (card.accelerator.across.bandwidth * card.achieved.across)
    assert row.seconds == pytest.approx(across + row.calls * card.accelerator.across.latency)


def test_traffic_is_of_the_rank_that_memory_shows() -> None:
    """The first stage of DeepSeek-V3 has dense layers alone."""
    layout = "dp=8,pp=16,cp=8,cp_kind=ulysses,zero=1,ep=8,schedule=zb-v,microbatches=32,recompute=full"
    one = option("deepseek-v3", layout, "128x8xH100", 1024, 8192)
    assert traffic_rank(one) == one.footprint.rank != 0
    found = sent(one)
    workload = one.workload
    rows = expected_traffic(
        workload.spec, workload.layout, 8192, 1024, "bfloat16", coords=RankCoords(pp=traffic_rank(one))
    )
    both = next(row for row in rows if (row.axis, row.kind) == ("cp", "all-to-all"))  # as a counter sees them
    assert found["cp", "all-to-all"].payload + found["ep", "all-to-all"].payload == both.payload
    given = simulate("deepseek-v3", layout, "128x8xH100", batch=1024, seq=8192).to_dict()
    assert given["traffic_rank"] == given["memory_rank"]
    assert "ep" in {row["axis"] for row in given["traffic"]}


def test_a_fullest_rank_without_experts_is_not_shown() -> None:
    """The first three of DeepSeek-V3's layers are dense, and here two ranks have them."""
    one = option("deepseek-v3", "dp=8,pp=61,ep=8,microbatches=64", "61x8xH100", 512)
    fullest = [replace(one, footprint=replace(one.footprint, rank=rank)) for rank in (0, 1, 2, 40)]
    assert [traffic_rank(each) for each in fullest] == [2, 2, 2, 40]


@pytest.mark.parametrize(
    ("layout", "axis", "kind", "name"),
    [
        ("dp=4,ep=4", "dp", "all-to-all", "ep"),
        ("dp=2,tp=2,sp,ep=4", "world", "all-to-all", "ep"),
        ("dp=4,ep=2", "ep", "all-to-all", "ep"),
        ("dp=4,ep=4,zero=1", "dp", "all-gather", "dp"),
        ("dp=4,ep=4,zero=1,dispatch=allgather", "dp", "all-gather", "dp, ep"),
        ("dp=2,cp=2,cp_kind=ulysses,ep=2", "cp", "all-to-all", "cp, ep"),
        ("cp=2,cp_kind=ulysses,dp=2", "cp", "all-to-all", "cp"),
    ],
)
def test_what_is_counted_has_the_names_of_all_that_sent_it(layout: str, axis: str, kind, name: str) -> None:
    assert display_axis(Layout.parse(layout), axis, kind) == name


def test_the_world_as_ep_is_no_few_numbers() -> None:
    """dp x tp ranks are the world, by whose name a counter has the experts' bytes."""
    row = sent(option("mixtral-8x7b", "dp=4,tp=2,sp,ep=8,zero=1", "8xH100", 4))["ep", "all-to-all"]
    assert row.across == 0.0
    assert row.seconds


def test_a_sentence_names_causes_of_half_the_difference() -> None:
    one = option("qwen3-30b-a3b", "dp=16,ep=8,zero=1,recompute=full,microbatches=4", "2x8xH100", 64)
    for other in neighbours(one):
        if other.slower is None or abs(other.slower) < 0.001:
            continue
        said = difference(one, evaluate(replace(one.workload, layout=other.layout))).split(": ", 1)[1]
        told = [float(word.strip(",%")) / 100 for word in said.split() if word[:1] in "+-"]
        assert 1 <= len(told) <= 3
        assert abs(sum(told)) >= abs(other.slower) / 2 - 0.002 or len(told) == 3
