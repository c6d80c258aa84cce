"""Rows of models with experts: shapes, routing, releases."""

import pytest

from fivefold.accuracy.cases import PublishedRow, measured, read_rows
from fivefold.accuracy.mixture_rows import imbalance_of, is_mixture, superseded_rows, with_experts
from fivefold.accuracy.score import evaluate, line_of, scores
from fivefold.accuracy.spelling import UnpredictableRow
from fivefold.cost.moe import IMBALANCE
from fivefold.cost.software import FUSED_EXPERTS, MEGATRON_EXPERTS
from fivefold.layout.layout import Layout
from fivefold.spec.presets import preset

BRIDGE = {
    "source": "Megatron-Bridge 26.04 perf summary", "model": "Qwen3_30B_a3B", "seq_len": "4096", "gpu": "B200",
    "gpus": "8", "gpus_per_node": "8", "dp": "8", "tp": "1", "pp": "1", "ep": "8", "micro_batch": "4",
    "global_batch": "512", "precision": "MXFP8", "tokens_per_s_per_gpu": "26000", "status": "ok",
    "notes": "MoE: force-balanced, dropless",
}  # fmt: skip


def row(line: int = 2, **changes: str) -> PublishedRow:
    return PublishedRow("bridge", line, BRIDGE | changes)


def test_a_row_takes_the_shape_of_its_preset_and_its_own_ep():
    run = measured(row())
    assert run.workload.spec.experts == preset("qwen3-30b-a3b").experts
    assert (run.workload.layout.ep, run.workload.layout.dp, run.workload.imbalance) == (8, 8, 1.0)
    assert run.seconds == pytest.approx(512 * 4096 / 26000 / 8)


@pytest.mark.parametrize("name", ["DeepSeek-V3 671B", "Qwen3 235B", "Mixtral 8x7B", "Grok-1 314B BF16", "kimi k2"])
def test_a_model_is_found_by_how_its_name_begins(name: str):
    assert measured(row(model=name, dp="8", ep="8")).workload.spec.experts is not None


def test_the_newest_release_of_a_configuration_is_judged_and_others_stay():
    rows = [row(2), row(3, source="Megatron-Bridge 26.06.01 perf summary"), row(4, micro_batch="1")]
    rows += [row(5, source="Megatron-Bridge 26.06 perf summary")]
    assert superseded_rows(rows) == {("bridge", 2): 3, ("bridge", 5): 3}
    refused = [result.refused for result in evaluate(rows)]
    assert [bool(text) for text in refused] == [True, False, False, True]


def test_kernels_are_those_of_the_release_and_the_device():
    new = "Megatron-Bridge 26.06 perf summary"
    assert measured(row(source=new)).workload.software.experts == FUSED_EXPERTS
    assert measured(row(source=new, gpu="H100", precision="FP8")).workload.software.experts == MEGATRON_EXPERTS
    assert measured(row()).workload.software.experts == MEGATRON_EXPERTS


def test_what_drops_tokens_or_is_unknown_is_refused():
    with pytest.raises(UnpredictableRow, match="drops tokens"):
        measured(row(model="DeepSeekV3 (tokendrop)"))
    with pytest.raises(UnpredictableRow, match="neither a preset"):
        measured(row(model="some-moe"))


@pytest.mark.parametrize("missing", ["layers", "hidden", "heads", "vocab"])
def test_experts_of_the_notes_need_the_rest_of_the_shape(missing: str):
    shape = {"layers": "4", "hidden": "64", "heads": "4", "vocab": "1000"} | {missing: ""}
    (one,) = evaluate([row(model="some-moe", notes="experts=8 top-k=2 expert_ffn=64", **shape)])
    assert one.refused.endswith(f"not published: {missing}")
    assert "some-moe" in one.refused


def test_experts_that_tp_divides_are_parts_with_the_same_work():
    spec, layout = preset("grok-1"), Layout(dp=8, tp=4, ep=1)
    parts, divided = with_experts(row(ep="8"), spec, layout, tp_shards_experts=True)
    assert divided.ep == 32
    assert not divided.problems(parts)
    assert parts.matmul_parameters - spec.matmul_parameters == spec.layers * 3 * 8 * spec.hidden  # of the router
    assert parts.experts.count * parts.experts.ffn == spec.experts.count * spec.experts.ffn


def test_real_routing_of_the_first_steps_is_that_of_routers_that_agree():
    spec, layout = preset("mixtral-8x7b"), Layout(dp=8, ep=8)
    untrained = row(notes="C4 with aux loss 0.0001; REAL routing (imbalanced), iterations 21-70")
    assert imbalance_of(untrained, spec, layout) == pytest.approx(4.0)
    assert imbalance_of(row(notes="real routing, aux loss 0.01"), spec, layout) == IMBALANCE
    assert imbalance_of(row(), spec, layout) == 1.0


def test_mixtures_score_on_lines_of_their_own_and_few_rows_are_not_judged():
    names = {line_of(one) for one in read_rows()}
    assert {"megatron_bridge", "megatron_bridge, experts", "laer_moe_megatron, experts"} <= names
    assert "laer_moe_megatron" not in names
    (line,) = scores(evaluate([row(), row(3, micro_batch="1")]))
    assert line.experts
    assert line.timed == 2
    assert not line.judged


def test_published_mixtures_are_within_15_percent_and_nearer_than_one_utilisation():
    rows = [one for one in read_rows() if is_mixture(one)]
    found = {one.source: one for one in scores(evaluate(rows, exact=False)) if one.judged}
    assert {*found} == {f"{name}, experts" for name in ("dgxc_benchmarking", "laer_moe_megatron", "megatron_bridge")}
    for one in found.values():
        assert one.mape < 0.155, one
        assert one.mape < one.null_mape
