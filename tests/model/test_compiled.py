"""Compiled blocks: the same numbers, one graph for all of them, nothing in between that Python has to do."""

import pytest
import torch

from fivefold.layout.layout import Recompute
from fivefold.model import compiler, linear_cross_entropy
from fivefold.model.decoder import Decoder
from fivefold.model.linear_cross_entropy import Targets
from fivefold.spec.presets import preset


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made and run by PyTorch's own kernels: a compiler of C++ would take a minute."""
    monkeypatch.setattr(compiler, "COMPILER_BACKEND", "aot_eager")
    linear_cross_entropy._compile_kernels.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize(
    "recompute", ["selective", *(pytest.param(how, marks=pytest.mark.slow) for how in ("none", "full"))]
)
def test_blocks_and_loss_are_four_graphs_without_a_break(recompute: Recompute) -> None:
    spec = preset("tiny-qwen3")
    plain = Decoder(spec, recompute).double()
    quick = Decoder(spec, recompute, compile=True).double()
    quick.load_state_dict(plain.state_dict())
    quick.ops.compiled = True
    tokens = torch.randint(0, spec.vocab, (2, 32))
    aim = Targets(tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.bool))
    losses = []
    for model in (plain, quick):
        loss = model(tokens, targets=aim)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)
    for (name, one), other in zip(plain.named_parameters(), quick.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-10, atol=1e-13), name
    assert compiler.compilation() == (4, {})  # four blocks are one graph; the loss is two, and one scales its gradient
