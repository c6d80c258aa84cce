"""Starts are equal to the bit in every layout, and bfloat16 adds up in float32 and does not round what is small."""

import pytest
import torch
from torch import Tensor

from fivefold.layout.layout import Layout
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from tests.parallel.zero.world import SEED, SMALL, each, forward_backward, full_tensor, make, microbatches, train
from tests.ranks import run_ranks

TINY = preset("tiny", layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=9, vocab=11)
OSS = preset("tiny-oss", layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=9, vocab=11)
STAGES = range(4)
EXACT = {one.name for spec in (SMALL, TINY, OSS) for one in spec.parameters() if one.full_precision}


def start(rank: int, world: int, layout: Layout, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, _, weights, _ = make(SMALL, layout, dtype)
    masters = {name: full_tensor(weights.as_dtensor(name, p.detach())) for name, p in weights.masters.items()}
    return masters, {name: full_tensor(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("world", "texts"),
    [
        (2, ["dp=2", "dp=2,zero=1", "dp=2,zero=3"]),
        pytest.param(4, ["dp=4,zero=2", "dp=4,zero=3,replicate=2", "dp=2,tp=2,sp,zero=3"], marks=pytest.mark.slow),
    ],
)
def test_the_same_seed_starts_from_the_same_bits(world: int, texts: list[str]) -> None:
    calls = [(Layout.parse(text), dtype) for text in texts for dtype in (torch.float32, torch.bfloat16)]
    model = Decoder(SMALL)
    initialise(model, SMALL, SEED)
    for rank in run_ranks(world, each, start, calls):
        for (layout, dtype), (masters, weights) in zip(calls, rank, strict=True):
            for name, p in model.named_parameters():
                assert masters[name].dtype == torch.float32
                assert torch.equal(masters[name], p)
                # FSDP2 rounds as it gathers; between the steps it holds the masters alone.
                assert torch.equal(weights[name], p if layout.zero == 3 or name in EXACT else p.to(dtype))


def gradients(rank: int, world: int, spec: ModelSpec, layout: Layout) -> dict[str, Tensor]:
    model, ops, weights, mesh = make(spec, layout, torch.bfloat16)
    parts, count = microbatches(spec, mesh, 0, 4, ())
    forward_backward(model, ops, weights, parts, count)
    grads = {name: p.grad for name, p in weights.masters.items() if p.grad is not None}
    return {name: full_tensor(weights.as_dtensor(name, grad)) for name, grad in grads.items()}


def test_bfloat16_gradients_of_two_ranks_are_those_of_two_microbatches_to_the_bit() -> None:
    """The summands are the same, and there are only two: in float32 they add up to the same bits."""
    calls = [(spec, Layout(dp=2, zero=stage)) for spec in (TINY, OSS) for stage in STAGES]
    alone = {spec.name: gradients(0, 1, spec, Layout(microbatches=2)) for spec in (TINY, OSS)}
    for rank in run_ranks(2, each, gradients, calls):
        for (spec, _), found in zip(calls, rank, strict=True):
            assert alone[spec.name].keys() == {one.name for one in spec.parameters()}
            for name, gradient in alone[spec.name].items():
                assert found[name].dtype == torch.float32
                assert torch.equal(found[name], gradient), name


def test_bfloat16_training_follows_one_process() -> None:
    alone = train(0, 1, OSS, Layout(microbatches=2), 4, (), torch.bfloat16)
    calls = [(OSS, Layout(dp=2, zero=stage), 4, (), torch.bfloat16) for stage in STAGES]
    for rank in run_ranks(2, each, train, calls):
        for stage, run in zip(STAGES, rank, strict=True):
            assert run.norms == pytest.approx(alone.norms, rel=1e-6)
            for name, master in alone.masters.items():
                torch.testing.assert_close(run.masters[name], master, rtol=0, atol=1e-6)
                if name in EXACT:
                    assert torch.equal(run.model[name], run.masters[name])
                elif stage < 3:
                    assert run.model[name].dtype == torch.bfloat16
                    assert torch.equal(run.model[name], run.masters[name].to(torch.bfloat16))
