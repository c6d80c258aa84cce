"""Tensor and sequence parallelism against one process: loss, every gradient, and what travels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.layout.layout import Layout
from fivefold.layout.sharding import chunk
from fivefold.losses.cross_entropy import CrossEntropy
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.layers import TokenPositions
from fivefold.model.linear_cross_entropy import Targets, loss_sum
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import TensorParallel
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from tests.parallel.zero.world import each
from tests.ranks import run_ranks

BOUND = 1e-10  # float64, max|a-b| / max|b|
B, S = 2, 8

MODELS = {
    "llama": preset("tiny", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=24, vocab=37),
    "one kv head": preset("tiny", layers=1, hidden=32, heads=4, kv_heads=1, head_dim=8, ffn=24, vocab=37),
    "tied": preset("tiny", layers=1, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=24, vocab=37, tied=True),
    "qwen2.5": preset("tiny-qwen2", layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=24, vocab=38),
    "qwen3": preset("tiny-qwen3", layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=24, vocab=38),
    "gpt": preset("tiny-gpt", layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=24, vocab=37, context=16),
    "short vocabulary": preset("tiny", layers=1, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=24, vocab=5),
}


def data(spec: ModelSpec) -> tuple[Tensor, Tensor, Tensor, TokenPositions]:
    random = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(spec.vocab, (2, B, S), generator=random)
    mask = torch.rand(B, S, generator=random) < 0.6
    documents = (torch.rand(B, S, generator=random) < 0.3).cumsum(1)
    return tokens, targets, mask, replace(TokenPositions.of(tokens), samples=torch.tensor([3, 11]), documents=documents)


def full(spec: ModelSpec, **loss: float) -> tuple[float, dict[str, Tensor]]:
    model = plain(spec)
    tokens, targets, mask, place = data(spec)
    total = loss_sum(model(tokens, place), targets, mask, CrossEntropy(**loss))
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain(spec: ModelSpec) -> Decoder:
    model = Decoder(spec, seed=5).double()
    initialise(model, spec, seed=5)
    with torch.no_grad():  # biases and norms away from their neutral start, so that one too many or too few shows
        for name, p in model.named_parameters():
            p += 0.1 * torch.sin(torch.arange(p.numel(), dtype=p.dtype) + len(name)).view(p.shape)
    return model


def parallel(spec: ModelSpec, layout: Layout) -> tuple[Decoder, TensorParallel]:
    mesh = Mesh.of(layout, torch.device("cpu"))
    ops = TensorParallel(spec, mesh)
    with torch.device("meta"):
        model = Decoder(spec, layout.recompute, seed=5, ops=ops).double()
    ops.shard_parameters(model)
    unsharded = dict(plain(spec).named_parameters())
    for name, parameter in list(model.named_parameters()):
        owner, _, kind = name.rpartition(".")
        module, value = model.get_submodule(owner), unsharded[name].detach()
        dim = ops.local_params[name].tp.dim
        if dim is not None:
            local = chunk(value.shape[dim], mesh.tp.size, mesh.tp.rank)
            value = value.narrow(dim, local.start, len(local)).contiguous()
        assert isinstance(parameter, DTensor)
        held = DTensor.from_local(
            value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
        setattr(module, kind, nn.Parameter(held))
    return model, ops


def losses_and_gradients(
    rank: int, world: int, spec: ModelSpec, layout: Layout, loss: dict[str, float]
) -> tuple[float, dict[str, Tensor]]:
    model, _ = parallel(spec, layout)
    tokens, targets, mask, place = data(spec)
    total = model(tokens, place, Targets(targets, mask, CrossEntropy(**loss)))
    total.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        gradients[name] = parameter.grad.full_tensor()
    return total.item(), gradients


def assert_same(got: list[tuple[float, dict[str, Tensor]]], want: tuple[float, dict[str, Tensor]]) -> None:
    scale = max(gradient.abs().max().item() for gradient in want[1].values())
    for loss, gradients in got:
        assert abs(loss - want[0]) <= BOUND * abs(want[0])
        assert gradients.keys() == want[1].keys()
        for name, gradient in gradients.items():
            if name.endswith("attention.k.bias") and want[1][name].abs().max() <= 1e-13 * scale:
                # Without rotations it moves all scores of a query alike: its gradient is 0 but for rounding.
                assert gradient.abs().max() <= 1e-13 * scale
            else:
                assert (gradient - want[1][name]).abs().max() <= BOUND * want[1][name].abs().max(), name


# Model, layout, settings of the loss.
CASES: list[tuple[str, Layout, dict[str, float]]] = [
    *((name, Layout(tp=2, sp=True, recompute="full" if name == "llama" else "selective"), {}) for name in MODELS
      if name != "short vocabulary"),
    *(("llama", Layout(tp=2), loss) for loss in ({"label_smoothing": 0.1}, {"label_smoothing": 0.2, "z_loss": 0.1})),
    # Two kv heads for four ranks; a vocabulary of 10, 10, 10, 7; and one too short for all ranks.
    *((name, Layout(tp=4, sp=name in ("llama", "qwen2.5")), {}) for name in ("llama", "gpt", "qwen2.5", "qwen3")),
    ("short vocabulary", Layout(tp=4), {}),
]  # fmt: skip


SLOW = [
    (name, Layout.from_dict({"tp": 2, "sp": how != "none", "recompute": how}), dict[str, float]())
    for name in MODELS for how in ("none", "selective", "full") if name != "short vocabulary"
]  # fmt: skip


@pytest.mark.parametrize("cases", [CASES, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["few", "every recompute"])
def test_ranks_compute_what_one_does(cases: list[tuple[str, Layout, dict[str, float]]]) -> None:
    for world in {layout.tp for _, layout, _ in cases}:
        asked = [(name, layout, loss) for name, layout, loss in cases if layout.tp == world]
        by_rank = run_ranks(world, each, losses_and_gradients, [(MODELS[name], *rest) for name, *rest in asked])
        for (name, layout, loss), *ranks in zip(asked, *by_rank, strict=True):
            print(name, layout, loss)  # pytest shows it of the one that fails
            assert_same(ranks, full(MODELS[name], **loss))
