"""Norms whose weights are wider than the stream: one rounding, at the end, and none that all tokens share."""

import math

import pytest
import torch
from torch import nn

from fivefold.layout.layout import Layout
from fivefold.model.decoder import Decoder
from fivefold.model.layers import apply_norm
from fivefold.parallel.data_parallel import shard_model
from fivefold.parallel.mesh import Mesh
from fivefold.spec.presets import preset

U = torch.finfo(torch.bfloat16).eps / 2  # the most that one rounding moves a number, relative to it


def drawn(kind: type[nn.Module], width: int = 48) -> nn.Module:
    norm, random = kind(width), torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.data += 0.3 * torch.randn(width, generator=random)
    return norm


def stream(tokens: int, width: int = 48) -> torch.Tensor:
    return torch.randn(2, tokens // 2, width, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_what_is_narrow_is_rounded_once_and_so_is_its_gradient(kind: type[nn.Module]) -> None:
    norm, x = drawn(kind), stream(8).requires_grad_()
    bias = getattr(norm, "bias", None)
    exact = drawn(kind).double()
    wide = x.detach().double().requires_grad_()
    y, wanted = apply_norm(norm, x, norm.weight, bias), exact(wide)
    toward = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    y.backward(toward)
    wanted.backward(toward.double())
    assert y.dtype == x.dtype == x.grad.dtype == torch.bfloat16
    # What cancels in float32 before the rounding is allowed for beside it.
    torch.testing.assert_close(y.double(), wanted, rtol=U, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=U, atol=1e-5)
    for name, parameter in norm.named_parameters():
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad.double(), exact.get_parameter(name).grad, rtol=1e-4, atol=1e-4)


def test_a_norm_keeps_the_narrow_stream_for_its_backward_pass() -> None:
    kept: list[torch.Tensor] = []
    norm, x = drawn(nn.RMSNorm), stream(8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        apply_norm(norm, x, norm.weight)
    assert {one.dtype for one in kept if one.shape == x.shape} == {torch.bfloat16}


@pytest.mark.parametrize("model", ["tiny", "tiny-gpt", "tiny-qwen3", "tiny-oss"])
def test_what_training_in_bfloat16_does_to_a_channel_averages_out_over_tokens(model: str) -> None:
    """A rounded weight moves its channel by up to U in every token. Roundings of outputs are independent and at most U:
    their mean over n tokens has a standard deviation of U / sqrt(3 n) or less, and 6 of them are never met."""
    spec, tokens = preset(model, layers=1), 4096
    with torch.device("meta"):
        decoder = Decoder(spec)
    weights = shard_model([decoder], spec, Mesh.of(Layout(), torch.device("cpu")), torch.bfloat16, seed=0)
    random = torch.Generator().manual_seed(3)
    for one in spec.parameters():
        if one.kind == "norm":
            weights.masters[one.name].data += 0.3 * torch.rand(one.shape, generator=random)
    weights.sync_params()
    block = decoder.layers["0"]
    x = stream(tokens, spec.hidden)
    found = decoder.ops.norm(block.attention_norm, x).double()
    exact = nn.RMSNorm(spec.hidden, spec.norm_eps) if spec.norm == "rmsnorm" else nn.LayerNorm(spec.hidden)
    exact.weight.data = weights.masters["layers.0.attention_norm.weight"].detach()
    wanted = exact.double()(x.double())
    shift = ((found - wanted) / wanted).mean((0, 1))
    assert shift.abs().max() < 6 * U / math.sqrt(3 * tokens)
    assert 6 * U / math.sqrt(3 * tokens) < U / 4  # rounded weights would be off by more
    for one in spec.parameters():
        if one.full_precision:
            assert decoder.get_parameter(one.name).dtype == torch.float32, one.name
            assert torch.equal(decoder.get_parameter(one.name), weights.masters[one.name])
