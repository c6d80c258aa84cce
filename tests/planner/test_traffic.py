"""The closed forms reduce to the textbook's where the textbook speaks."""

from fractions import Fraction

import pytest

from fivefold.cost.collective_time import Traffic, total, wire
from fivefold.cost.traffic import expected_traffic
from fivefold.layout.axes import AXES
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.spec.presets import preset

SPEC = preset("tiny", vocab=256)  # everything divides
M = SPEC.parameter_count * 4
B, S, E = 8, 32, SPEC.hidden


def sent(layout: str, dtype: str = "float32", **more: object) -> dict[tuple[str, str], Traffic]:
    rows = expected_traffic(SPEC, Layout.parse(layout), S, B, dtype, **more)
    return {row[:2]: row for row in rows}


@pytest.mark.parametrize("n", [2, 4, 8])
def test_plain_data_parallelism_sends_2m_of_its_gradients(n: int) -> None:
    [row] = expected_traffic(SPEC, Layout(dp=n), S, 8, "float32")
    assert row[:2] == ("dp", "all-reduce")
    assert row.payload == M + 32
    assert row.wire == 2 * (M + 32) * Fraction(n - 1, n)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_send_as_much_as_plain_data_parallelism(stage: int) -> None:
    rows = sent(f"dp=4,zero={stage}")
    reduced, gathered = rows["dp", "reduce-scatter"], rows["dp", "all-gather"]
    assert (reduced.payload, gathered.payload) == (M, M)
    assert reduced.wire + gathered.wire == 2 * M * Fraction(3, 4)


def test_zero_3_sends_3m_in_each_microbatch_zero_2_reduces_in_each_and_zero_1_once() -> None:
    for m in (1, 2):
        rows = sent(f"dp=4,zero=3,microbatches={m}")
        weights_and_gradients = rows["dp", "all-gather"].wire + rows["dp", "reduce-scatter"].wire
        assert weights_and_gradients == m * 3 * M * Fraction(3, 4)
    assert sent("dp=2,zero=2,microbatches=4")["dp", "reduce-scatter"].payload == 4 * M
    assert sent("dp=2,zero=1,microbatches=4")["dp", "reduce-scatter"].payload == M


def test_bfloat16_gathers_half_of_what_it_reduces_but_norms_whole() -> None:
    rows = sent("dp=2,zero=1", "bfloat16")
    norms = sum(p.size for p in SPEC.parameters() if p.kind == "norm") * 4
    assert rows["dp", "reduce-scatter"].payload == M
    assert rows["dp", "all-gather"].payload == (M - norms) / 2 + norms


def test_zero_3_in_bfloat16_gathers_no_norms_and_sums_their_gradients_once_a_step() -> None:
    norms = sum(p.size for p in SPEC.parameters() if p.kind == "norm") * 4
    for m in (1, 2):
        rows, plain = (sent(f"dp=4,zero=3,microbatches={m}", dtype) for dtype in ("bfloat16", "float32"))
        assert rows["dp", "all-gather"].payload == m * (M - norms)
        assert rows["dp", "reduce-scatter"].payload == m * (M - norms)
        assert rows["dp", "all-reduce"].payload - plain["dp", "all-reduce"].payload == norms


def test_tensor_parallelism_has_four_all_reduces_of_bse_a_layer() -> None:
    rows = [
        expected_traffic(preset("tiny", layers=layers, vocab=256), Layout(tp=2), S, B, "float32")[0]
        for layers in (1, 2)
    ]
    assert rows[1].calls - rows[0].calls == 4
    assert rows[1].payload - rows[0].payload == 4 * B * S * E * 4


def test_sequence_parallelism_sends_as_much_and_gathers_its_saved_inputs_again() -> None:
    plain, sp = sent("tp=2"), sent("tp=2,sp")
    layer = Fraction(B * S * E * 4, 2)  # of one gather or scatter, on the wire
    halves = sp["tp", "all-gather"].wire + sp["tp", "reduce-scatter"].wire
    # An all-reduce is a scatter and a gather; of each column group the input is gathered once more. The head's is not:
    # it takes its gradients while it has it. And the gradient that it sums is a scatter alone.
    large = plain["tp", "all-reduce"].wire - sp["tp", "all-reduce"].wire
    norms = sum(p.size for p in SPEC.parameters() if p.kind == "norm") * 4
    assert halves == large + norms + 2 * SPEC.layers * layer


def test_recompute_sends_the_layers_forward_again_and_selective_recompute_nothing() -> None:
    assert sent("tp=2,recompute=selective") == sent("tp=2")
    more = sent("tp=2,recompute=full")["tp", "all-reduce"].calls - sent("tp=2")["tp", "all-reduce"].calls
    assert more == 2 * SPEC.layers


def test_the_ring_sends_what_the_design_says() -> None:
    """2 S h (c-1)/c elements forward, the same again backward, and 2 S h of gradients that travel home."""
    c, h = 4, SPEC.kv_heads * SPEC.head_dim
    row = sent("cp=4")["cp", "send"]
    assert row.wire == row.payload == SPEC.layers * B * 4 * (2 * 2 * S * h * (c - 1) // c + 2 * S * h)


def test_all_gather_and_ulysses_trade_these() -> None:
    kv, q = SPEC.kv_heads * SPEC.head_dim, SPEC.heads * SPEC.head_dim
    rows = sent("cp=2,cp_kind=allgather")
    assert rows["cp", "all-gather"].payload == SPEC.layers * 2 * 2 * B * S * kv * 4
    assert rows["cp", "reduce-scatter"].payload == SPEC.layers * 2 * B * S * kv * 4
    assert sent("cp=2,cp_kind=ulysses")["cp", "all-to-all"].payload == (
        SPEC.layers * 2 * B * (S // 2) * (2 * q + 2 * kv) * 4
    )
    # Two kv heads over four ranks are repeated to four.
    assert sent("cp=4,cp_kind=ulysses")["cp", "all-to-all"].payload == (
        SPEC.layers * 2 * B * (S // 4) * (2 * q + 2 * 2 * kv) * 4
    )


def test_hybrid_sharding_adds_up_its_copies_once_a_step() -> None:
    rows = sent("dp=4,zero=3,replicate=2,microbatches=2")
    assert rows["replicate", "all-reduce"].payload == M // 2
    assert rows["fsdp", "all-gather"].payload == 2 * 2 * M
    assert rows["fsdp", "reduce-scatter"].payload == 2 * M


# ---- pipelines -------------------------------------------------------------------------------------------------------


def of_rank(layout: str, rank: int, **more: object) -> dict[tuple[str, str], Traffic]:
    parsed = Layout.parse(layout)
    return sent(layout, coords=RankCoords.of(parsed, rank), **more)


@pytest.mark.parametrize(
    ("layout", "boundaries"),
    [
        ("pp=4,microbatches=4", [1, 2, 2, 1]),
        ("pp=4,microbatches=4,schedule=zb-h1", [1, 2, 2, 1]),
        ("pp=2,microbatches=4,schedule=interleaved", [3, 3]),  # stages 0 1 0 1: three boundaries, both ways
        ("pp=2,microbatches=4,schedule=zb-v", [2, 2]),  # stages 0 1 1 0: the middle one stays on a rank
    ],
)
def test_a_pipeline_sends_bse_forward_and_back_per_microbatch_and_boundary(layout: str, boundaries: list[int]) -> None:
    m = Layout.parse(layout).microbatches
    for rank, count in enumerate(boundaries):
        row = of_rank(layout, rank)["pp", "send"]
        assert (row.calls, row.payload) == (count * m, count * B * S * E * 4)
        assert row.wire == row.payload


def test_sequence_and_context_parallel_ranks_send_their_tokens_only() -> None:
    whole = sent("pp=2,microbatches=2")["pp", "send"].payload
    assert sent("pp=2,tp=2,microbatches=2")["pp", "send"].payload == whole
    assert sent("pp=2,tp=2,sp,microbatches=2")["pp", "send"].payload == whole // 2
    assert sent("pp=2,cp=2,microbatches=2")["pp", "send"].payload == whole // 2


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp", "cp=2", "cp=2,cp_kind=ulysses,recompute=full", "dp=2,zero=3"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_the_ranks_of_a_pipeline_share_what_one_rank_sends(layout: str, schedule: str) -> None:
    """Each its own layers, the first the embedding, the last the head: together no more and no less."""
    alone = sent(f"{layout},microbatches=2", min_bucket_elements=1)
    pipeline = f"{layout},microbatches=2,pp=2,schedule={schedule}"
    ranks = [sent(pipeline, coords=RankCoords(pp=rank), min_bucket_elements=1) for rank in range(2)]
    numbers = ("all-reduce",)  # those of the loss and the norm are on every rank
    for (axis, kind), row in alone.items():
        if kind not in numbers:
            both = [rank[axis, kind].payload for rank in ranks if (axis, kind) in rank]
            assert sum(both) == row.payload, (axis, kind)
    assert sum(rank["pp", "send"].payload for rank in ranks) > 0


def test_the_ends_of_a_pipeline_add_up_a_tied_embedding() -> None:
    tied = preset("tiny", vocab=256, tied=True)
    table = tied.vocab * tied.hidden * 4
    rows = [expected_traffic(tied, Layout(pp=4), S, B, "float32", coords=RankCoords(pp=rank)) for rank in range(4)]
    shared = [sum(row.payload for row in some if row.axis == "embedding") for some in rows]
    assert shared == [table, 0, 0, table]
    # Two ranks are the ends of their own axis, and a V has both ends on one rank.
    two = {row[:2]: row for row in expected_traffic(tied, Layout(pp=2), S, B, "float32")}
    assert two["pp", "all-reduce"].payload == table + 4 * 8
    vee = expected_traffic(tied, Layout(pp=2, schedule="zb-v"), S, B, "float32")
    assert [row.payload for row in vee if row[:2] == ("pp", "all-reduce")] == [4 * 8]


def test_weight_gradients_of_their_own_are_buckets_of_their_own() -> None:
    """As many bytes, in more calls: linears, and the rest."""
    whole, split = (sent(f"dp=2,pp=2,zero=1,schedule={name}")["dp", "reduce-scatter"] for name in ("1f1b", "zb-h1"))
    assert split.payload == whole.payload
    assert split.calls == 2 * whole.calls


def test_coords_follow_the_order_of_the_axes() -> None:
    layout = Layout(dp=4, replicate=2, zero=3, pp=2, cp=2, tp=2)
    all_coords = [RankCoords.of(layout, rank) for rank in range(32)]
    assert [coords[:3] for coords in all_coords[:5]] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0)]
    assert all_coords[8][:3] == (0, 0, 2)
    assert all_coords[16][:3] == (0, 0, 0)  # the other copy
    assert [coords.efsdp for coords in all_coords[:16:8]] == [0, 4]  # experts are sharded over tp too


def test_smaller_buckets_are_more_calls_of_as_many_bytes() -> None:
    few, many = sent("dp=2,zero=1"), sent("dp=2,zero=1", min_bucket_elements=1)
    assert many["dp", "all-gather"].calls == SPEC.layers + 2 > few["dp", "all-gather"].calls
    assert many["dp", "all-gather"].payload == few["dp", "all-gather"].payload


def test_wire_is_the_share_that_a_rank_does_not_keep_and_rows_of_one_axis_and_kind_are_one() -> None:
    assert expected_traffic(SPEC, Layout(), S, B, "float32") == []
    assert [wire(kind, 100, 4) for kind in ("all-gather", "all-reduce", "send")] == [75, 150, 100]
    parts = [Traffic("tp", "send", 1, 10, Fraction(10)), Traffic("dp", "send", 1, 1, Fraction(1))]
    assert total([*parts, parts[0]]) == [parts[1], Traffic("tp", "send", 2, 20, Fraction(20))]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("dp=4", {"fsdp": "dp", "dp_cp": "dp", "world": "dp"}),
        ("cp=2,tp=2", {"fsdp": "cp", "dp_cp": "cp", "world": "world"}),
        ("dp=2,cp=2", {"fsdp": "fsdp", "dp_cp": "fsdp", "world": "fsdp"}),
        ("dp=4,zero=3,replicate=2", {"replicate": "replicate", "fsdp": "fsdp", "dp_cp": "dp", "world": "dp"}),
        ("dp=2,cp=2,zero=3,replicate=2", {"replicate": "dp", "fsdp": "cp", "dp_cp": "dp_cp", "world": "dp_cp"}),
        ("pp=2", {"embedding": "pp", "world": "pp"}),
        ("pp=4", {"embedding": "embedding", "world": "pp"}),
        ("dp=2,pp=4,schedule=interleaved", {"embedding": "embedding", "fsdp": "dp", "world": "world"}),
    ],
)
def test_axes_of_the_same_ranks_are_one(layout: str, names: dict[str, str]) -> None:
    parsed = Layout.parse(layout)
    assert {axis: parsed.same_axis(axis) for axis in names} == names
    assert all(parsed.size(axis) == parsed.size(parsed.same_axis(axis)) for axis in AXES)
