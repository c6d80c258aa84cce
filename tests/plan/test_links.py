"""Collectives by where an axis's ranks are."""

import pytest

from fivefold.hardware.accelerators import find_accelerator
from fivefold.layout.layout import Layout
from fivefold.plan.cost.kernels import Device
from fivefold.plan.cost.links import Wires

DEVICE = Device.of(find_accelerator("H100"))
GB = 1e9


def wires(layout: str, order: tuple[str, ...] = ("tp", "cp", "pp", "dp")) -> Wires:
    return Wires(DEVICE, 8, Layout.parse(layout), order)


def test_reaches_follow_the_order_of_the_axes() -> None:
    found = wires("tp=4,cp=2,pp=4,dp=2").reaches
    assert (found["tp"].together, found["cp"].together, found["pp"].together, found["dp"].together) == (4, 2, 1, 1)
    assert found["zero"].ranks == 4
    assert found["zero"].together == 2


def test_megatron_s_order_keeps_dp_inside_where_ours_keeps_pp() -> None:
    ours, theirs = wires("tp=4,pp=2,dp=2"), wires("tp=4,pp=2,dp=2", ("tp", "cp", "dp", "pp"))
    assert (ours.across("dp"), ours.across("pp")) == (True, False)
    assert (theirs.across("dp"), theirs.across("pp")) == (False, True)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    one = wires("tp=8")
    both = one.time("reduce-scatter", "tp", GB) + one.time("all-gather", "tp", GB)
    assert one.time("all-reduce", "tp", GB) == pytest.approx(both)


def test_a_large_collective_takes_its_wire_bytes_over_the_bandwidth() -> None:
    one = wires("tp=8")
    assert one.time("all-reduce", "tp", 8 * GB) == pytest.approx(2 * 8 * GB * 7 / 8 / one.bandwidth("tp"), rel=0.01)


def test_ranks_of_one_node_share_its_ports() -> None:
    """dp=16 on two nodes sends through eight ports each; with tp=8 in between, through one."""
    assert wires("dp=16").bandwidth("dp") > 6 * wires("tp=8,dp=2").bandwidth("dp")


def test_a_small_collective_over_many_nodes_takes_a_tree() -> None:
    many = wires("tp=8,dp=1024")
    ring = 2 * 1024 * DEVICE.accelerator.across.latency
    assert many.time("all-reduce", "dp", 1024.0) < ring / 10


def test_one_rank_sends_nothing() -> None:
    assert wires("dp=8").time("all-reduce", "tp", GB) == 0.0


def test_a_group_that_lies_across_two_nodes_is_not_inside() -> None:
    """Ranks 4 to 7 of nodes of six."""
    straddling = Wires(DEVICE, 6, Layout.parse("dp=3,tp=4"), ("tp", "cp", "pp", "dp"))
    assert straddling.across("tp")


def test_a_gather_over_many_ranks_pays_for_every_hop() -> None:
    few, many = (wires(f"dp={n}").time("all-gather", "dp", 1024.0) for n in (64, 4096))
    assert many > 30 * few


def test_an_all_to_all_leaves_by_each_rank_s_own_port() -> None:
    gathered, traded = (wires("cp=16").time(kind, "cp", 16 * GB) for kind in ("all-gather", "all-to-all"))  # type: ignore[arg-type]
    assert traded > 3 * gathered
