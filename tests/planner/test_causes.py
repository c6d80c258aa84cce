"""What made predictions of runs that nobody had seen wrong, cause by cause: each has its mechanism, or its switch."""

from dataclasses import replace

import pytest
from msgspec import structs

from fivefold.cost.collective_time import COLLECTIVE_START, Topology
from fivefold.cost.kernels import Device
from fivefold.cost.software import Overlap, SoftwareProfile
from fivefold.cost.step import Workload, estimate
from fivefold.cost.systems import INTERNEVO, NEMO, ZERO_2021
from fivefold.hardware.accelerators import find_accelerator
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.spec.presets import preset


def workload(
    model: str, layout: str, cluster: str, batch: int, software: SoftwareProfile = NEMO, **changes: str
) -> Workload:
    return Workload(
        preset(model), Layout.parse(layout), Cluster.parse(cluster), 8192, batch, software=software, **changes
    )


def test_tp_hides_in_pieces_only_where_ranks_reach_each_other_s_memory() -> None:
    inside, across = (workload("llama3-70b", f"tp={tp},sp", "2x8xH100", 1).block_cost for tp in (8, 16))
    plain = replace(across, software=NEMO.but(overlap=Overlap(tp_backward=1)))
    assert inside.topology.by_peers("tp")
    assert not across.topology.by_peers("tp")
    assert across.block.forward.tp == plain.block.forward.tp  # nothing is hidden
    bare = replace(inside, software=NEMO.but(overlap=Overlap()))
    assert inside.block.forward.tp < 0.5 * bare.block.forward.tp


def test_gradients_wait_for_ports_that_tp_holds() -> None:
    wide = workload("llama3-70b", "dp=8,tp=16,zero=1,sp", "16x8xH100", 8)
    assert wide.block_cost.inter_node_backward_seconds > 0
    assert replace(wide, layout=Layout.parse("dp=16,tp=8,zero=1,sp")).block_cost.inter_node_backward_seconds == 0
    alone = replace(wide, software=NEMO.but(overlap=structs.replace(NEMO.overlap, dp=0)))
    assert estimate(wide).dp < estimate(alone).dp


def test_a_collective_has_a_start_of_its_own() -> None:
    device = Device.of(find_accelerator("H100"))
    ours, without = (Topology(device, 8, Layout(tp=8), start=start) for start in (COLLECTIVE_START, 0.0))
    assert ours.time("all-gather", "tp", 1e6) - without.time("all-gather", "tp", 1e6) == pytest.approx(COLLECTIVE_START)
    cores = Device.of(find_accelerator("CPU"))
    assert Topology(cores, 2, Layout(tp=2)).time("all-gather", "tp", 1e6) == Topology(
        cores, 2, Layout(tp=2), start=0.0
    ).time("all-gather", "tp", 1e6)


def test_groups_of_zero_1_gather_within_themselves_and_broadcasts_cost_with_ranks() -> None:
    whole, groups = (
        workload("llama3-8b", f"dp=64,zero=1,replicate={copies}", "8x8xA100-80", 64, INTERNEVO) for copies in (1, 8)
    )
    assert estimate(groups).dp < estimate(whole).dp
    calm = replace(whole, software=INTERNEVO.but(broadcasts=False))
    assert estimate(calm).dp < estimate(whole).dp
    early = replace(whole, software=INTERNEVO.but(overlap=Overlap(dp=1)))
    assert estimate(early).dp < estimate(whole).dp  # the next forward does not wait


def test_parameters_that_travel_one_by_one_pay_with_every_rank() -> None:
    few, many = (
        workload("gpt3-175b", f"dp={n},zero=3,recompute=full", f"{n // 8}x8xA100-80", n, ZERO_2021) for n in (64, 1024)
    )
    together = [replace(one, software=ZERO_2021.but(unit_parts=1, copies_parts=False)) for one in (few, many)]
    added = [
        estimate(one).busy.zero - estimate(other).busy.zero for one, other in zip((few, many), together, strict=True)
    ]
    assert added[1] > 10 * added[0] > 0


def test_four_bits_are_quicker_than_eight_and_cast_more() -> None:
    eight, four = (
        workload("llama3-70b", "dp=8,zero=3", "8xB200", 8, precision=precision) for precision in ("fp8", "fp4")
    )
    assert estimate(four).busy.gemm < estimate(eight).busy.gemm
    assert estimate(four).busy.memory > estimate(eight).busy.memory
