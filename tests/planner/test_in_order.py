"""The collectives of a layer, one by one, add up to what a layer adds to the traffic of a step."""

from collections import Counter
from typing import Any

import pytest

from fivefold.cost.traffic import expected_traffic, layer_collectives
from fivefold.layout.layout import Layout
from fivefold.spec.blocks import LatentSpec
from fivefold.spec.presets import preset

SEQ, BATCH, LAST = 64, 16, 3
WHOLE_QUERIES = {"mla": LatentSpec(kv_rank=32, nope_dim=24, rope_dim=16, v_dim=32)}
ALL_HEADS = {"qk_norm_over": "all"}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("tiny", {}, "tp=2,dp=2,zero=1,microbatches=2"),
    ("tiny", {}, "tp=2,dp=2,zero=1,sp,microbatches=2,recompute=full"),
    ("tiny", {}, "dp=2,cp=2,zero=2,microbatches=2,recompute=full"),
    ("tiny", {}, "dp=2,cp=2,cp_kind=allgather,zero=3,microbatches=2"),
    ("tiny", {}, "dp=2,tp=2,cp=2,cp_kind=ulysses,sp,zero=0,microbatches=2"),
    ("tiny", {}, "dp=4,tp=2,sp,zero=3,replicate=2,microbatches=2"),
    ("tiny", {}, "dp=4,tp=2,sp,zero=3,microbatches=1"),
    ("tiny-moe", {}, "dp=4,tp=2,ep=4,zero=1,sp,microbatches=2,recompute=full"),
    ("tiny-moe", {}, "dp=4,tp=2,ep=4,zero=3,microbatches=2"),
    ("tiny-moe", {}, "dp=4,tp=2,ep=2,zero=1,microbatches=2,dispatch=allgather,recompute=full"),
    ("tiny-deepseek", {}, "dp=4,tp=2,ep=2,zero=1,sp,microbatches=2"),
    ("tiny-deepseek", {}, "dp=4,tp=2,zero=1,microbatches=2,recompute=full"),
    ("tiny-mla", {}, "dp=2,tp=2,zero=1,sp,microbatches=2,recompute=full"),
    ("tiny-mla", WHOLE_QUERIES, "dp=2,tp=2,zero=1,sp,microbatches=2"),
    ("tiny-qwen3", ALL_HEADS, "dp=2,tp=2,zero=1,sp,microbatches=2,recompute=full"),
]


@pytest.mark.parametrize(("name", "but", "text"), CASES)
def test_they_are_what_a_layer_adds_to_a_step(name: str, but: dict[str, Any], text: str) -> None:
    layout = Layout.parse(text)
    spec, fewer = preset(name, layers=LAST + 1, **but), preset(name, layers=LAST, **but)
    rows: Counter[tuple[str, str, str]] = Counter()
    for one, sign in ((spec, 1), (fewer, -1)):
        for row in expected_traffic(one, layout, SEQ, BATCH, "float32", min_bucket_elements=1):
            rows[row.axis, row.kind, "calls"] += sign * row.calls
            rows[row.axis, row.kind, "bytes"] += sign * row.payload
    for sent in layer_collectives(spec, layout, SEQ, BATCH, "float32", LAST, min_bucket_elements=1):
        often = 1 if sent.when == "once a step" else layout.microbatches
        axis = layout.same_axis(sent.axis)
        rows[axis, sent.kind, "calls"] -= often * sent.calls
        rows[axis, sent.kind, "bytes"] -= often * sent.calls * sent.payload
    assert {key: left for key, left in rows.items() if left and key[0] != "world"} == {}  # the world's are of no layer


def test_a_stage_passes_its_output_on() -> None:
    spec, layout = preset("tiny", layers=4), Layout.parse("dp=2,pp=2,zero=1,microbatches=4,split=2,2")
    sent = [
        [(one.when, one.axis) for one in layer_collectives(spec, layout, SEQ, BATCH, "float32", layer)]
        for layer in range(4)
    ]
    assert [("forward", "pp") in one for one in sent] == [False, True, False, False]
    assert [("backward", "pp") in one for one in sent] == [False, False, True, False]


def test_forward_comes_first() -> None:
    sent = layer_collectives(
        preset("tiny"), Layout.parse("dp=2,tp=2,sp,zero=1,microbatches=2"), SEQ, BATCH, "float32", 1
    )
    order = ["forward", "backward", "once a step"]
    assert [one.when for one in sent] == sorted((one.when for one in sent), key=order.index)
    assert [one.kind for one in sent[:4]] == ["all-gather", "reduce-scatter"] * 2


def test_one_microbatch_is_no_reason_to_reduce_earlier() -> None:
    """ZeRO 3 over tp: weights of kv heads in every microbatch, full-precision norms once a step."""
    told = []
    for microbatches in (1, 2):
        layout = Layout.parse(f"dp=4,tp=2,sp,zero=3,microbatches={microbatches}")
        sent = layer_collectives(preset("tiny", kv_heads=1), layout, SEQ, BATCH, "bfloat16", 1)
        told.append([one for one in sent if one.kind == "all-reduce"])
    assert told[0] == told[1]
    assert {one.when for one in told[0] if one.axis == "tp"} == {"backward", "once a step"}
