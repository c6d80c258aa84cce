"""Closed forms against the layouts that they stand for: all of 16 ranks, or every so-manieth."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from fivefold.cost.closed_forms import PipelineForm
from fivefold.cost.model_state import FIVEFOLD_ACCOUNTING, PAPER_ACCOUNTING, Accounting
from fivefold.cost.peak_memory import USABLE_FRACTION, RankBlocks, backward_peak, footprint
from fivefold.cost.step import Workload, estimate
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.closed_forms import MEMORY_SLACK, by_pipeline, unlike
from fivefold.planner.explain import EQUAL_TIME
from fivefold.planner.mixed import divide_layers
from fivefold.planner.mixed_space import mixed_space
from fivefold.planner.option import evaluate
from fivefold.planner.plan import question
from fivefold.planner.search import search
from fivefold.planner.space import SearchQuery, space
from fivefold.spec.presets import preset

DENSE = {
    "fivefold": question("llama3-8b", "2x8xH100", batch=64, seq=4096),
    "tied": question("gpt2-124m", "4x4xA100-80", batch=64, seq=1024, precision="fp32"),
    "nemo": question("llama3-8b", "2x8xH100", batch=64, seq=4096, software="nemo"),
    "cpu": question("llama3.2-1b", "16xCPU", batch=16, seq=512, precision="fp32"),
}
EXPERTS = {
    "plain": question("qwen3-30b-a3b", "2x8xH100", batch=64, seq=4096),
    "shared": question("deepseek-v2-lite", "2x8xH100", batch=64, seq=4096),
}


def but_one_slow(workloads: dict[str, Workload], last: str) -> list[Any]:
    """All of them, of which the one that takes longest waits for `make prove`."""
    return [pytest.param(one, id=name, marks=[pytest.mark.slow] * (name == last)) for name, one in workloads.items()]


def errors(workload: Workload, fixed: dict[str, object], most: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Of time and memory, relative to what is executed."""
    layouts = space(SearchQuery(workload, fixed))
    assert len(layouts)
    times, sizes = [], []
    for at in range(0, len(layouts), -(-len(layouts) // most)):
        executed = replace(workload, layout=layouts.layout(at))
        times.append(layouts.seconds[at] / estimate(executed).seconds - 1)
        sizes.append(layouts.memory[at] / footprint(executed).total - 1)
    return np.array(times), np.array(sizes)


@pytest.mark.parametrize("workload", but_one_slow(DENSE, "nemo"))
def test_of_one_stage_the_closed_form_is_the_step(workload: Workload) -> None:
    """But for gradients, which it hides behind the blocks alone, and not behind the head: so it is never shorter. What
    an all-reduce has of a tree is left out, too."""
    times, _ = errors(workload, {"pp": 1})
    assert times.min() > -0.001
    assert times.max() < 0.05
    assert np.median(np.abs(times)) < 0.001


@pytest.mark.parametrize("workload", but_one_slow(EXPERTS, "shared"))
def test_of_one_stage_with_experts_it_is_near(workload: Workload) -> None:
    """Layers with experts and those without are one mean layer there."""
    times, _ = errors(workload, {"pp": 1})
    assert times.min() > -0.02
    assert times.max() < 0.08
    assert np.median(np.abs(times)) < 0.02


@pytest.mark.parametrize("workload", [*DENSE.values(), *EXPERTS.values()][:3], ids=[*DENSE, *EXPERTS][:3])
def test_of_one_stage_and_sequence_no_memory_is_pruned_that_fits(workload: Workload) -> None:
    """Larger microbatches may need less than it says: some gradients do not exist yet at their peak. What ZeRO 3 has
    gathered of the model's ends is left out, so there may be too little, and never too much."""
    for zero in range(4):
        _, sizes = errors(workload, {"pp": 1, "samples": 1, "zero": zero})
        assert sizes.max() < MEMORY_SLACK - 1
        assert sizes.min() > (1 / MEMORY_SLACK - 1 if zero < 3 else -0.25)


@pytest.mark.parametrize(
    ("workload", "fixed"),
    [
        pytest.param(DENSE["nemo"], {"zero": 3, "recompute": "none"}, marks=pytest.mark.slow, id="nemo"),
        pytest.param(EXPERTS["plain"], {"zero": 2, "recompute": "full", "tp": 1, "cp": 1}, id="experts"),
    ],
)
def test_of_16_ranks_the_best_is_not_pruned(workload: Workload, fixed: dict[str, object]) -> None:
    """Of all layouts, each executed, none is so much faster than what the search finds that anybody could tell."""
    fixed = fixed | {"samples": 1}
    found, layouts = search(workload, top=1, **fixed).best, space(SearchQuery(workload, fixed))
    room = USABLE_FRACTION * workload.first_device.accelerator.memory
    timed = 0
    for at in np.flatnonzero(layouts.seconds < 2 * found.seconds).tolist():
        executed = replace(workload, layout=layouts.layout(at))
        if footprint(executed).total <= room:
            timed += 1
            assert found.seconds <= (1 + EQUAL_TIME) * estimate(executed).seconds, executed.layout
    assert timed > 20


@pytest.mark.parametrize(
    "each", [FIVEFOLD_ACCOUNTING, PAPER_ACCOUNTING, Accounting.of("float32")], ids=["ours", "paper", "float32"]
)
def test_states_of_arrays_are_those_of_numbers(each: Accounting) -> None:
    zero, ranks = np.array(list(product(range(4), (1, 8)))).T
    states = each.state(1e9, 1e9 / ranks, zero, ranks)
    for at, (stage, many) in enumerate(zip(zero.tolist(), ranks.tolist(), strict=True)):
        assert tuple(part[at] for part in states) == each.state(1e9, 1e9 / many, stage, many)


def test_pipelines_of_arrays_are_those_of_numbers() -> None:
    columns = np.array([(p, m, v) for p in (1, 2, 8) for m in (1, 8, 64) for v in (1, 2)]).T
    for facts in ((1.0, False, False), (0.4, True, False), (1.0, False, True)):
        spread = PipelineForm(*columns, *(np.full(columns.shape[1], fact) for fact in facts))
        rows = spread.seconds(2.0, 1.5 * columns[0], 0.01, 0.8)
        for row, numbers in zip(rows, columns.T.tolist(), strict=True):
            assert row == pytest.approx(PipelineForm(*numbers, *facts).seconds(2.0, 1.5 * numbers[0], 0.01, 0.8))


def test_a_pipeline_that_refills_takes_a_whole_pass_for_each_microbatch() -> None:
    once, again = (PipelineForm(4, 10, 1, 1.0, waits=False, refills=refills) for refills in (False, True))
    assert once.seconds(1.0, 4.0, 0.0, 1.0) == 10 + 3
    assert again.seconds(1.0, 4.0, 0.0, 1.0) == 10 * 4


def test_of_unlike_layers_each_rank_takes_what_its_own_take() -> None:
    """Layers that see all tokens, and those with a window, as the stages have them; their mean was off by half."""
    workload = question("tiny-oss", "8xH100", batch=16, seq=65536)
    times, _ = errors(workload, {"pp": 4, "schedule": "1f1b"}, most=40)
    assert np.abs(times).max() < 0.03


# ---- models of unlike layers ----------------------------------------------------------------------------------------

SPARSE = [{"mixer": "attention", "mlp": "dense"}, {"mixer": "attention"}]
APART = [{"mixer": "attention"}, {"mlp": "dense"}, {"mixer": {"name": "attention", "window": 128}, "mlp": "dense"}]


def of_pattern(name: str, pattern: list[dict[str, object]], cluster: str = "4x8xH100", **numbers: int) -> Workload:
    spec = preset(name, pattern=pattern)
    return Workload(spec, Layout(), Cluster.parse(cluster), **{"seq": 4096, "batch": 64, **numbers})


def test_of_unlike_layers_no_memory_is_more_than_its_rank_s_own_layers_take() -> None:
    """By means over layers it was 22 to 50% more for 1F1B."""
    workload = of_pattern("llama3-8b", SPARSE, "2x8xH100")
    times, sizes = errors(workload, {"pp": 4, "schedule": "1f1b", "samples": 1, "zero": 1}, most=40)
    assert -0.05 < sizes.min() <= sizes.max() < MEMORY_SLACK - 1
    assert np.abs(times).max() < 0.03


@pytest.mark.parametrize("pattern", [SPARSE, APART], ids=["sparse", "apart"])
def test_of_unlike_layers_no_layout_that_fits_is_pruned(pattern: list[dict[str, object]]) -> None:
    workload = of_pattern("llama2-70b", pattern)
    layouts = space(SearchQuery(workload, {"samples": 1}))
    room = USABLE_FRACTION * workload.first_device.accelerator.memory
    fitting = 0
    for at in range(0, len(layouts), -(-len(layouts) // 60)):
        if footprint(replace(workload, layout=layouts.layout(at))).total <= room:
            fitting += 1
            assert layouts.memory[at] <= MEMORY_SLACK * room, layouts.layout(at)
    assert fitting > 20


def test_over_unlike_nodes_unlike_layers_are_dealt_out_by_what_each_takes() -> None:
    """The closed form that ranks them is near what is executed, in time and memory."""
    workload = of_pattern("llama3-8b", SPARSE, "8xH100+8xA100-80", seq=8192)
    query = SearchQuery(workload, {"tp": 2, "cp": 1, "schedule": "1f1b", "samples": 1, "recompute": "full", "zero": 1})
    candidates = mixed_space(query)
    assert len(candidates)
    for at in range(len(candidates)):
        option = evaluate(divide_layers(candidates.workload(workload, at)))
        assert candidates.space.seconds[at] == pytest.approx(option.seconds, rel=0.15)
        used = option.footprint.total / option.device_memory
        assert candidates.space.memory[at] == pytest.approx(used, rel=0.15)


def test_a_block_s_backward_peak_counts_only_what_is_freed_behind_it() -> None:
    """Layers of two kinds that alternate: before the first backward pass of one kind, one of the other has freed."""
    workload = replace(of_pattern("llama3-8b", SPARSE, "8xH100"), layout=Layout.parse("dp=8,microbatches=8"))
    blocks = RankBlocks(workload)
    dense, bare = (blocks.of_layer(layer) for layer in (0, 1))
    peak = backward_peak(workload, workload.stages[0], blocks, peak_precedes_grads=False)
    [at_dense], [at_bare] = dense.moments, bare.moments
    assert peak.bytes == pytest.approx(max(0.0, at_bare.bytes, at_dense.bytes - bare.freed))
    assert peak.bytes > max(0.0, at_bare.bytes, at_dense.bytes - 16 * bare.freed)


def test_seconds_of_some_layouts_are_those_of_all() -> None:
    for model, fixed in (("llama3-8b", {"samples": 1}), ("tiny-deepseek", {}), ("tiny-moe", {})):
        layouts = space(SearchQuery(Workload(preset(model), Layout(), Cluster.parse("8xH100"), 512, 16), fixed))
        some = np.random.default_rng(0).permutation(len(layouts))[:500]
        assert layouts.seconds_of(some).tolist() == layouts.seconds[some].tolist()


def test_unlike_rows_are_those_of_a_sort() -> None:
    columns = np.random.default_rng(0).integers(0, 7, (3, 400))
    first, at = unlike(*columns)
    keys, wanted, inverse = np.unique(columns, axis=1, return_index=True, return_inverse=True)
    assert columns[:, first].tolist() == keys.tolist()
    assert first.tolist() == wanted.tolist()
    assert at.tolist() == inverse.ravel().tolist()


def test_no_layout_is_left_out_where_layouts_are_parted_by_pipeline() -> None:
    of = space(SearchQuery(Workload(preset("tiny-moe"), Layout(), Cluster.parse("8xH100"), 512, 16), {})).of
    parts = list(by_pipeline(of))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(of.tp)))
    for rows in parts:
        assert len(set(of.pp[rows].tolist())) == 1
        assert of.pp[rows[0]] == 1 or len(set(of.pipeline[rows].tolist())) == 1
