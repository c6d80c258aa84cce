"""AdamW over masters, on one device: equal to torch's own on the same gradients."""

import pytest
import torch
from torch import nn

from fivefold.layout.layout import Layout
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.linear_cross_entropy import loss_sum
from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig
from fivefold.parallel.data_parallel import shard_model
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.optimizer import Optimizer
from fivefold.parallel.weights import Weights
from fivefold.spec.presets import preset

SPEC = preset("tiny", layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=12, vocab=23)
CPU = torch.device("cpu")


def made(config: OptimizerConfig, dtype: torch.dtype) -> tuple[nn.Module, Weights, Optimizer]:
    mesh = Mesh.of(Layout(), CPU)
    with torch.device("meta"):
        model = Decoder(SPEC)
    weights = shard_model([model], SPEC, mesh, dtype, seed=3)
    return model, weights, Optimizer(weights, SPEC, config, mesh, dtype)


def backward(model: nn.Module, seed: int) -> None:
    tokens, targets = torch.randint(SPEC.vocab, (2, 2, 5), generator=torch.Generator().manual_seed(seed))
    loss_sum(model(tokens), targets, torch.ones_like(tokens, dtype=torch.bool)).div(10).backward()


def test_float32_on_one_device_is_stock_adamw_to_the_bit() -> None:
    config = AdamW(clip=0.0, weight_decay=0.2)
    model, weights, optimizer = made(config, torch.float32)
    assert all(weights.masters[name] is p for name, p in model.named_parameters())
    plain = Decoder(SPEC)
    initialise(plain, SPEC, seed=3)
    kinds = {p.name: p.kind for p in SPEC.parameters()}
    split = [
        [p for name, p in plain.named_parameters() if (kinds[name] == "linear") is linear] for linear in (True, False)
    ]
    groups = [{"params": split[0], "weight_decay": 0.2}, {"params": split[1], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, lr=0.01, fused=True)
    for step in range(3):
        for microbatch in range(2):
            backward(plain, 2 * step + microbatch)
            with weights.microbatch(last=microbatch == 1):
                backward(model, 2 * step + microbatch)
        weights.finish_grad_sync()
        norm = optimizer.gradient_norm()
        squares = sum(p.grad.double().square().sum() for p in plain.parameters() if p.grad is not None)
        torch.testing.assert_close(norm, torch.as_tensor(squares).sqrt(), rtol=1e-14, atol=0)
        optimizer.step(0.01, norm)
        adam.step()
        adam.zero_grad()
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b), name
            assert a.grad is None


@pytest.mark.parametrize("clip", [0.01, 1e6, 0.0])
def test_gradients_above_the_limit_are_scaled_down_to_it_and_others_left_alone(clip: float) -> None:
    model, weights, optimizer = made(AdamW(clip=clip), torch.float64)
    with weights.microbatch(last=True):
        backward(model, 0)
    weights.finish_grad_sync()
    norm = optimizer.gradient_norm()
    assert 0.01 < norm < 1e6
    scale = clip / (norm + 1e-6) if clip == 0.01 else 1.0
    before = {name: p.grad.clone() for name, p in weights.masters.items() if p.grad is not None}
    optimizer.step(1e-3, norm)
    for name, moments in optimizer.state().items():
        torch.testing.assert_close(moments["exp_avg"], 0.1 * before[name] * scale)


def test_without_a_rate_nothing_changes_and_the_gradients_are_gone() -> None:
    model, weights, optimizer = made(AdamW(), torch.bfloat16)
    before = {name: p.clone() for name, p in weights.masters.items()}
    with weights.microbatch(last=True):
        backward(model, 0)
    weights.finish_grad_sync()
    optimizer.step(None, optimizer.gradient_norm())
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in weights.masters.items())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    assert all(torch.equal(p, before[name].to(p.dtype)) for name, p in model.named_parameters())
