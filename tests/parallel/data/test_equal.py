"""Every stage computes what one process with stock AdamW computes on the whole batch."""

import pytest
import torch

from fivefold.layout import Layout
from fivefold.presets import preset
from fivefold.spec import ModelSpec
from tests.parallel.data.world import BOUND, SMALL, Run, apart, reference, train
from tests.ranks import run_ranks

UNEVEN = preset("tiny", layers=1, hidden=10, heads=1, kv_heads=1, head_dim=10, ffn=7, vocab=257, tied=True)
ONE_KV = preset("tiny", layers=1, hidden=12, heads=2, kv_heads=1, head_dim=6, ffn=6, vocab=19)
SHORT = preset("tiny", layers=1, hidden=8, heads=2, kv_heads=1, head_dim=2, ffn=3, vocab=5)
GPT = preset("tiny-gpt", layers=1, hidden=16, heads=4, kv_heads=4, head_dim=4, ffn=24, vocab=37, context=8, dropout=0.0)


def check(spec: ModelSpec, text: str, count: int = 8, empty: tuple[int, ...] = ()) -> list[Run]:
    layout = Layout.parse(text)
    expected = reference(spec, count, empty)
    one_rank = layout.world == 1
    args = (spec, layout, count, empty)
    runs: list[Run] = [train(0, 1, *args)] if one_rank else run_ranks(layout.world, train, *args)
    for run in runs:
        assert run.norms == pytest.approx(expected.norms, rel=BOUND)
        assert apart(run.gradients, expected.gradients) < BOUND
        assert apart(run.masters, expected.masters) < BOUND
        assert apart(run.moments, expected.moments) < BOUND
        assert all(torch.equal(run.model[name], run.masters[name]) for name in expected.masters)
    losses = [sum(run.losses[step] for run in runs) / layout.tp for step in range(len(expected.losses))]
    assert losses == pytest.approx(expected.losses, rel=BOUND)
    return runs


@pytest.mark.parametrize("text", ["dp=1", "microbatches=4", "zero=2", "zero=1,microbatches=2,recompute=full"])
def test_one_rank(text: str) -> None:
    check(SMALL, text)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(stage: int, microbatches: int) -> None:
    check(SMALL, f"dp=2,zero={stage},microbatches={microbatches}")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_ranks_with_rows_that_do_not_divide_and_a_tied_head(stage: int) -> None:
    check(UNEVEN, f"dp=4,zero={stage},microbatches=2")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fewer_rows_than_ranks(stage: int) -> None:
    check(SHORT, f"dp=4,zero={stage}")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_whose_every_target_is_masked(stage: int) -> None:
    check(SMALL, f"dp=2,zero={stage},microbatches=2", empty=(4, 5, 6, 7))


@pytest.mark.parametrize(
    "text", ["dp=2,zero=3,replicate=2", "dp=4,zero=3,replicate=2", "dp=4,zero=3,replicate=2,microbatches=2"]
)
def test_hybrid_sharding(text: str) -> None:
    check(SMALL, text)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("stage", [1, 3])
def test_recompute(stage: int, recompute: str) -> None:
    check(SMALL, f"dp=2,zero={stage},recompute={recompute},microbatches=2")


@pytest.mark.parametrize("text", ["tp=2,sp", "dp=2,tp=2", "dp=2,tp=2,sp,zero=1", "dp=2,tp=2,sp,zero=2,microbatches=2"])
def test_beside_tensor_parallelism(text: str) -> None:
    check(SMALL, text)


def test_fully_sharded_beside_tensor_parallelism() -> None:
    check(SMALL, "dp=2,tp=2,sp,zero=3,microbatches=2")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_biases_and_positions_whose_gradients_are_summed_over_tp(stage: int) -> None:
    check(GPT, f"dp=2,tp=2,sp,zero={stage}")


@pytest.mark.parametrize("stage", [2, 3])
def test_kv_heads_that_several_ranks_share(stage: int) -> None:
    check(ONE_KV, f"dp=2,tp=2,zero={stage}")
