"""A step's time: causes add up, schedules are simulated, unlike nodes get unlike stages."""

from dataclasses import replace

import pytest
from msgspec import structs

from fivefold.cost.peak_memory import footprint
from fivefold.cost.software import FIVEFOLD, ON_CPUS, Overlap
from fivefold.cost.step import Workload, costs, estimate, rank_flops, stage_passes
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.planner.mixed import groups_of
from fivefold.schedules.registry import build
from fivefold.schedules.simulate import simulate
from fivefold.spec.presets import preset


def workload(
    layout: str, model: str = "llama3-8b", cluster: str = "8xH100", batch: int = 64, seq: int = 8192
) -> Workload:
    return Workload(preset(model), Layout.parse(layout), Cluster.parse(cluster), seq, batch)


LAYOUTS = ["dp=8,zero=1", "dp=8,zero=3,microbatches=8", "tp=8,sp", "cp=8", "dp=2,tp=2,pp=2,zero=1,sp,microbatches=8"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_causes_add_up_to_the_step_and_none_beats_the_peak_rate(layout: str) -> None:
    one, step = workload(layout), estimate(workload(layout))
    assert sum(step.causes.values()) == pytest.approx(step.seconds)
    assert all(seconds >= -1e-9 for seconds in step.causes.values())
    assert 0.05 < one.mfu(step.seconds, "causal") < 0.8


def test_the_pipeline_is_timed_by_its_own_schedule() -> None:
    one = workload("pp=8,schedule=zb-v,microbatches=16", batch=16)
    step = estimate(one)
    again = simulate(build("zb-v", 8, 16), costs(one, stage_passes(one)))
    assert step.pipeline == again.makespan
    assert step.simulation is not None
    assert step.simulation.schedule.name == again.schedule.name


def test_zero_bubble_shortens_a_short_pipeline_s_step() -> None:
    plain, bubbleless = (
        estimate(workload(f"pp=8,schedule={name},microbatches=16", batch=16)) for name in ("1f1b", "zb-v")
    )
    assert bubbleless.seconds < 0.85 * plain.seconds


def test_on_cpus_nothing_hides_anything() -> None:
    one = replace(
        workload("dp=2", model="small", cluster="2xCPU", batch=2, seq=512),
        precision="fp32",
        software=ON_CPUS.computing_in("fp32"),
    )
    step, hidden = estimate(one), estimate(replace(one, software=one.software.but(overlap=Overlap(dp=1))))
    count = one.spec.parameter_count
    assert step.dp == pytest.approx(one.topology.time("all-reduce", "dp_cp", 4.0 * count))
    assert hidden.dp < step.dp
    launched = 2 * one.spec.layers * ON_CPUS.host * ON_CPUS.achieved.host
    assert step.busy.host == pytest.approx(launched)
    assert estimate(replace(one, software=one.software.but(computes_itself=False))).busy.host == 0.0


def test_full_recompute_costs_about_a_third_and_selective_little() -> None:
    none, selective, full = (
        estimate(workload(f"dp=8,recompute={how}")).seconds for how in ("none", "selective", "full")
    )
    assert 1.2 < full / none < 1.36
    assert 1.0 < selective / none < 1.1


def test_tp_that_leaves_the_node_pays_for_it() -> None:
    inside = estimate(workload("dp=2,tp=8,sp", cluster="2x8xH100"))
    outside = estimate(workload("tp=16,sp", cluster="2x8xH100"))
    assert outside.busy.tp > 2.5 * inside.busy.tp


def test_overlap_hides_at_most_what_compute_allows() -> None:
    one = workload("dp=8,zero=3,microbatches=8")
    bare = replace(one, software=FIVEFOLD.but(overlap=Overlap()))
    assert estimate(one).busy.zero < estimate(bare).busy.zero
    slow = structs.replace(
        one.cluster.groups[0].accelerator, inside=structs.replace(one.first_device.accelerator.inside, bandwidth=1e9)
    )
    group = structs.replace(one.cluster.groups[0], accelerator=slow)
    assert estimate(replace(one, cluster=Cluster((group,)))).busy.zero > 10 * estimate(one).busy.total


def test_a_host_that_is_slower_than_its_device_sets_the_pace() -> None:
    one = workload("dp=8", model="tiny", seq=128, batch=8)
    step = estimate(one)
    assert step.busy.host > 0.5 * step.seconds


def test_a_layout_over_unlike_nodes_waits_for_the_slower() -> None:
    line = "pp=2,tp=4,sp,microbatches=64"
    fast, slow = (estimate(workload(line, cluster=f"8x{name}")).seconds for name in ("H100", "A100-80"))
    one = workload(line, cluster="4xH100+4xA100-80")
    mixed = estimate(replace(one, groups=groups_of(one.cluster, one.layout))).seconds
    assert 1.5 * fast < mixed <= 1.02 * slow


def test_float32_holds_and_sends_twice_the_bytes() -> None:
    narrow = workload("tp=8,sp")
    wide = replace(narrow, precision="fp32", software=FIVEFOLD.computing_in("fp32"))
    assert footprint(wide).activations.total > 1.9 * footprint(narrow).activations.total
    assert estimate(wide).busy.tp > 1.5 * estimate(narrow).busy.tp


def test_more_backward_never_makes_a_step_faster() -> None:
    """Gradients hide behind the backward pass there is, not behind more."""
    layout = "dp=4,tp=2,pp=8,zero=2,sp,schedule=zb-v,microbatches=8,recompute="
    times = [
        estimate(workload(layout + how, "llama3-70b", "16x4xH100", 32, 512)).seconds
        for how in ("none", "selective", "full")
    ]
    assert times == sorted(times)


@pytest.mark.parametrize("layout", ["pp=2", "tp=2,pp=2,sp,recompute=full", "cp=4,pp=2", "cp=4,cp_kind=ulysses,pp=2"])
def test_a_stage_takes_what_the_windows_of_its_own_layers_leave_it(layout: str) -> None:
    """One layer that sees 128 tokens and one that sees all 65,536: attention is where they differ."""
    one = replace(workload(f"{layout},microbatches=2", batch=2, seq=65_536), spec=preset("gpt-oss-20b", layers=2))
    one = replace(one, layout=structs.replace(one.layout, split=(1, 1)))
    narrow, wide = (one.block_cost.of(one.spec.kinds(layer)).block for layer in (0, 1))
    first, last = stage_passes(one)
    assert first.forward.attention == narrow.forward.attention
    assert last.forward.attention == wide.forward.attention > 10 * narrow.forward.attention
    assert first.forward.gemm == narrow.forward.gemm == wide.forward.gemm


@pytest.mark.parametrize("name", ["llama3.2-1b", "gpt-oss-20b", "deepseek-v2-lite", "olmoe-1b-7b"])
@pytest.mark.parametrize(
    "layout", ["dp=2,tp=2,pp=2,zero=1,microbatches=4", "dp=2,cp=2,pp=2,zero=3,recompute=full,microbatches=2"]
)
def test_a_pattern_that_is_written_down_costs_the_same_to_the_bit(name: str, layout: str) -> None:
    spec = preset(name)
    layers = tuple(spec.kinds(layer) for layer in range(spec.layers))
    experts = structs.replace(spec.experts, dense_layers=0) if spec.experts else None
    written = structs.replace(spec, pattern=layers, window=0, window_period=1, experts=experts)
    one, other = (replace(workload(layout, batch=8, seq=4096), spec=model) for model in (spec, written))
    assert estimate(one).causes == estimate(other).causes
    assert footprint(one).parts == footprint(other).parts


def test_pairs_of_stages_play_each_layer_as_long_as_it_takes() -> None:
    layout = "dp=4,pp=2,ep=4,schedule=dualpipe-v,microbatches=8"
    one = replace(workload(layout, batch=32, seq=65_536), spec=preset("gpt-oss-20b", layers=4))
    one = replace(one, layout=structs.replace(one.layout, split=(1, 1, 1, 1)))
    forward = [sum(segment.compute for segment in halves[0]) for halves in one.durations.segments]
    assert forward[1] > 2 * forward[0]
    assert forward[2] < forward[1]


def test_a_rank_s_flops_are_those_of_its_own_layers() -> None:
    spec, layout = preset("gpt-oss-20b", layers=2, vocab=1), Layout(pp=2, split=(1, 1))
    narrow, wide = (rank_flops(spec, layout, 4096, 1, at=RankCoords(pp=pp)) for pp in (0, 1))
    each = 3.5 * 4 * (4096 / 2 - 128) * spec.heads * spec.head_dim
    assert wide - narrow == pytest.approx(4096 * (each + 3 * 2 * spec.hidden))  # the last one has a head of one word
