"""Collectives by where an axis's ranks are."""

import pytest

from fivefold.cost.collective_time import Topology
from fivefold.cost.kernels import Device
from fivefold.cost.step import Workload
from fivefold.hardware.accelerators import LINKS, find_accelerator
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.mixed import groups_of
from fivefold.spec.presets import preset

DEVICE = Device.of(find_accelerator("H100"))
GB = 1e9


def topology(layout: str, order: tuple[str, ...] = ("tp", "cp", "pp", "dp")) -> Topology:
    return Topology(DEVICE, 8, Layout.parse(layout), order)


def test_reaches_follow_the_order_of_the_axes() -> None:
    found = topology("tp=4,cp=2,pp=4,dp=2").reaches
    assert (found["tp"].together, found["cp"].together, found["pp"].together, found["dp"].together) == (4, 2, 1, 1)
    assert found["fsdp"].ranks == 4
    assert found["fsdp"].together == 2


def test_megatron_s_order_keeps_dp_inside_where_ours_keeps_pp() -> None:
    ours, theirs = topology("tp=4,pp=2,dp=2"), topology("tp=4,pp=2,dp=2", ("tp", "cp", "dp", "pp"))
    assert (ours.across("dp"), ours.across("pp")) == (True, False)
    assert (theirs.across("dp"), theirs.across("pp")) == (False, True)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    one = topology("tp=8")
    both = one.time("reduce-scatter", "tp", GB) + one.time("all-gather", "tp", GB)
    assert one.time("all-reduce", "tp", GB) == pytest.approx(both)


def test_a_large_collective_takes_its_wire_bytes_over_the_bandwidth() -> None:
    one = topology("tp=8")
    assert one.time("all-reduce", "tp", 8 * GB) == pytest.approx(2 * 8 * GB * 7 / 8 / one.bandwidth("tp"), rel=0.01)


def test_ranks_of_one_node_share_its_ports() -> None:
    """dp=16 on two nodes sends through eight ports each; with tp=8 in between, through one."""
    assert topology("dp=16").bandwidth("dp") > 6 * topology("tp=8,dp=2").bandwidth("dp")


def test_a_small_collective_over_many_nodes_takes_a_tree() -> None:
    many = topology("tp=8,dp=1024")
    ring = 2 * 1024 * DEVICE.accelerator.across.latency
    assert many.time("all-reduce", "dp", 1024.0) < ring / 10


def test_one_rank_sends_nothing() -> None:
    assert topology("dp=8").time("all-reduce", "tp", GB) == 0.0


def test_a_group_that_lies_across_two_nodes_is_not_inside() -> None:
    """Ranks 4 to 7 of nodes of six."""
    straddling = Topology(DEVICE, 6, Layout.parse("dp=3,tp=4"), ("tp", "cp", "pp", "dp"))
    assert straddling.across("tp")


def test_a_gather_over_many_ranks_pays_for_every_hop() -> None:
    few, many = (topology(f"dp={n}").time("all-gather", "dp", 1024.0) for n in (64, 4096))
    assert many > 30 * few


def test_an_all_to_all_leaves_by_each_rank_s_own_port() -> None:
    gathered, traded = (topology("cp=16").time(kind, "cp", 16 * GB) for kind in ("all-gather", "all-to-all"))  # type: ignore[arg-type]
    assert traded > 3 * gathered


# Where ranks are, and what lies between them


def sent(gpus: int, layout: str, name: str = "H100") -> float:
    """Seconds of a message between two pipeline ranks, without the share of the link that is reached."""
    device = Device.of(find_accelerator(name)).achieving(inside=1.0, across=1.0)
    return Topology(device, gpus, Layout.parse(layout)).time("send", "pp", GB)


def test_the_link_is_the_nodes_own_inside_and_the_networks_across() -> None:
    inside, across = LINKS["NVLink4"], LINKS["InfiniBand-NDR"]
    assert sent(8, "pp=8") == pytest.approx(inside.latency + GB / inside.bandwidth)
    assert sent(8, "pp=2,tp=8") == pytest.approx(across.latency + GB / across.bandwidth)


def test_a_rack_of_72_is_one_node() -> None:
    inside, across = LINKS["NVLink5"], LINKS["InfiniBand-NDR"]
    assert sent(72, "pp=9,tp=8", "GB200") == pytest.approx(inside.latency + GB / inside.bandwidth)
    assert sent(72, "pp=2,tp=72", "GB200") == pytest.approx(across.latency + GB / across.bandwidth)


def test_pipeline_ranks_count_through_nodes_and_then_groups() -> None:
    cluster = Cluster.parse("2x8xH100+3x4xA100-80")
    assert groups_of(cluster, Layout.parse("pp=7,tp=4")) == (0, 0, 0, 0, 1, 1, 1)


def test_unlike_nodes_meet_at_the_slower_end() -> None:
    cluster, layout = Cluster.parse("8xH100+8xRTX4090"), Layout.parse("pp=2,tp=8")
    workload = Workload(preset("llama3-8b"), layout, cluster, 4096, 8, groups=groups_of(cluster, layout))
    assert [workload.block_cost_of(rank).device.accelerator.across for rank in (0, 1)] == [LINKS["Ethernet-10G"]] * 2
    alone = Workload(preset("llama3-8b"), layout, Cluster.parse("2x8xH100"), 4096, 8)
    assert alone.first_device.accelerator.across == LINKS["InfiniBand-NDR"]


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    inside, across = topology("dp=8"), topology("tp=8,dp=2")
    assert inside.bandwidth("dp") == LINKS["NVLink4"].bandwidth * DEVICE.achieved.inside
    assert across.bandwidth("dp") == LINKS["InfiniBand-NDR"].bandwidth * DEVICE.achieved.across
