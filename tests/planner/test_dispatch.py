"""What experts send, given where tokens go, and what a rank holds of them."""

import numpy as np
import pytest

from fivefold.cost.model_state import state_of
from fivefold.cost.routing import rows_of, tokens_of
from fivefold.cost.traffic import expected_traffic
from fivefold.layout.layout import Layout
from fivefold.layout.rank_part import RankCoords
from fivefold.spec.blocks import Experts
from fivefold.spec.presets import preset

SEQ, BATCH, COUNT, K = 16, 8, 8, 2
SPEC = preset("tiny", layers=2, hidden=32, ffn=24, vocab=37, experts=Experts(count=COUNT, top_k=K, ffn=12))
LAYOUTS = [
    "dp=2,ep=2", "tp=4,ep=2", "tp=4,ep=4,sp", "cp=2,tp=2,ep=4", "cp=4,cp_kind=ulysses,ep=2",
    "dp=2,pp=2,ep=2,microbatches=2", "dp=4,ep=2,zero=3,replicate=2,microbatches=2",
]  # fmt: skip


@pytest.mark.parametrize("text", [*LAYOUTS, "tp=4"])
def test_every_token_is_routed_by_one_rank_of_a_stage(text: str) -> None:
    layout = Layout.parse(text)
    visits = np.zeros((BATCH, SEQ), int)
    for rank in range(layout.world):
        for microbatch in range(layout.microbatches if layout.position("pp", rank) == 0 else 0):
            np.add.at(visits, tokens_of(layout, rank, SEQ, BATCH, microbatch), 1)
    assert (visits == 1).all()


def test_slices_of_tokens_are_ragged_and_may_be_empty() -> None:
    layout = Layout(tp=4)
    assert [len(tokens_of(layout, rank, 3, 2, 0)[0]) for rank in range(4)] == [2, 2, 2, 0]


@pytest.mark.parametrize("text", LAYOUTS)
def test_what_is_sent_is_received_and_adds_up_to_all_slots(text: str) -> None:
    layout, rng = Layout.parse(text), np.random.default_rng(0)
    routing = {layer: rng.integers(0, COUNT, (BATCH, SEQ, K)) for layer in range(2)}
    rows = [rows_of(SPEC, layout, rank, SEQ, BATCH, routing) for rank in range(layout.world)]
    for group in layout.groups("ep"):
        for exchanged in zip(*(rows[rank] for rank in group), strict=True):
            assert sum(row.sent for row in exchanged) == sum(row.received for row in exchanged)
            assert all(0 <= row.kept <= min(row.sent, row.received) for row in exchanged)
    assert sum(row.sent for one in rows for row in one) == 2 * BATCH * SEQ * K


def test_a_rank_is_charged_for_the_larger_side_of_an_exchange() -> None:
    layout = Layout(dp=2, ep=2)
    to_the_first = {layer: np.zeros((BATCH, SEQ, K), np.int64) for layer in range(2)}
    for rank, received in ((0, BATCH * SEQ * K), (1, 0)):
        rows, half = rows_of(SPEC, layout, rank, SEQ, BATCH, to_the_first), BATCH * SEQ * K // 2
        assert rows == [(half, received, received // 2)] * 2  # the first keeps all of its own
        sent = expected_traffic(
            SPEC, layout, SEQ, BATCH, "float32", coords=RankCoords.of(layout, rank), routed_rows=rows
        )
        [row] = [row for row in sent if row.kind == "all-to-all"]
        assert row.calls == 2 * 5  # counts, tokens there and back, and both again backward
        assert row.payload == 2 * (COUNT * 8 + 4 * max(rows[0]) * SPEC.hidden * 4)
        # Half of the counts; tokens go to the other rank or come back from it, never both.
        assert row.wire == 2 * (COUNT * 8 // 2 + 2 * half * SPEC.hidden * 4)


def test_an_even_load_is_what_is_planned_with() -> None:
    [row] = [
        row for row in expected_traffic(SPEC, Layout(dp=2, ep=2), SEQ, BATCH, "float32") if row.kind == "all-to-all"
    ]
    assert row.payload == 2 * (COUNT * 8 + 4 * (BATCH * SEQ * K // 2) * SPEC.hidden * 4)


def test_a_rank_holds_its_share_of_experts() -> None:
    experts = sum(parameter.size for parameter in SPEC.parameters() if parameter.experts)
    dense = SPEC.parameter_count - experts
    for text, zero, weights, moments in (
        ("dp=2,ep=2", 0, dense + experts // 2, dense + experts // 2),
        ("dp=4,ep=2", 1, dense + experts // 2, dense / 4 + experts / 4),
        ("dp=4,ep=4", 3, dense / 4 + experts / 4, dense / 4 + experts / 4),
        ("dp=4,ep=1", 3, dense / 4 + experts / 4, dense / 4 + experts / 4),
    ):
        held = state_of(SPEC, Layout.parse(f"{text},zero={zero}"), "float32")
        assert held.parameters == pytest.approx(4 * weights, rel=0.01)  # the vocabulary is padded
        assert held.optimizer == pytest.approx(8 * moments, rel=0.01)
    alone = state_of(SPEC, Layout(tp=2, zero=3), "float32")  # nobody to share the dense weights with
    assert alone.parameters < state_of(SPEC, Layout(tp=2), "float32").parameters == alone.parameters + 4 * experts / 2
