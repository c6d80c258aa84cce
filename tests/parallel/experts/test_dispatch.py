"""Dispatch across ranks against one device: every choice of experts, ranks without tokens, experts without any."""

from functools import cache

import pytest
import torch
from torch import Tensor

from fivefold.layout.layout import Layout
from fivefold.model.dispatch import LocalDispatch
from fivefold.model.layers import TokenPositions
from fivefold.model.moe import MoE
from fivefold.model.ops import LocalOps
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.token_dispatch import dispatch_of
from fivefold.spec import mlps
from fivefold.spec.presets import preset
from tests.parallel.zero.world import each
from tests.ranks import run_ranks

SPEC = preset("tiny-moe", layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, vocab=11)
CHOICES = {
    "one expert has all": lambda n: torch.tensor([[3, 5]]).expand(n, 2),
    "the last rank has all": lambda n: torch.tensor([[6, 7]]).expand(n, 2),
    "the router's": None,
}


def made(dispatch: LocalDispatch | None) -> MoE:
    """The same weights on every rank: of each expert its own."""
    module = MoE(mlps.MixtureOfExperts(), SPEC, LocalOps(dispatch=dispatch)).double()
    for number, (_, p) in enumerate(module.named_parameters()):
        p.data = 0.3 * torch.sin(torch.arange(p.numel(), dtype=torch.float64) * 0.7 + number).view(p.shape)
    return module


def tokens(batch: int, seq: int) -> Tensor:
    return torch.randn(batch, seq, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def run(module: MoE, x: Tensor, choice: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    if (choose := CHOICES[choice]) is not None:
        module.router.choose = lambda scores: choose(scores.shape[0]).clone()
    x = x.clone().requires_grad_()
    y, (counts, _) = module(x, TokenPositions.of(x[..., 0]))
    assert counts.dtype == torch.int64
    (y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def on_a_rank(
    rank: int, world: int, text: str, choice: str, batch: int, seq: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    layout = Layout.parse(text)
    mesh = Mesh.of(layout, torch.device("cpu"), spec=SPEC)
    dispatch = dispatch_of(SPEC, mesh)
    module = made(dispatch)
    here = mesh.ep.rank
    for linear in (module.experts.gate, module.experts.up, module.experts.down):
        assert linear is not None
        rows = linear.weight.shape[0] // layout.ep
        linear.weight = torch.nn.Parameter(linear.weight.data[here * rows : (here + 1) * rows].clone())
    return run(module, tokens(batch, seq), choice)


LAYOUTS = ["dp=2,ep=2", "dp=2,ep=2,dispatch=allgather", "tp=2,ep=2", "tp=2,ep=2,dispatch=allgather"]
CASES = [(layout, choice, 2, 3) for layout in LAYOUTS for choice in CHOICES]
# One token of one row is the slice of the first tp rank; the second has none, and experts all the same.
CASES += [(layout, "the last rank has all", 1, 1) for layout in LAYOUTS[2:]]


@cache
def found_by_case() -> dict[tuple[str, str, int, int], list[tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    return dict(zip(CASES, map(list, zip(*run_ranks(2, each, on_a_rank, CASES), strict=True)), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_compute_what_one_device_computes(case: tuple[str, str, int, int]) -> None:
    layout, choice, batch, seq = case
    y, dx, gradients = run(made(None), tokens(batch, seq), choice)
    found = found_by_case()[case]
    for mine, back, _ in found:
        torch.testing.assert_close(mine, y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(back, dx, rtol=1e-12, atol=1e-12)
    # Over dp both ranks route the same tokens here, so each expert gets them twice.
    times = 2 if layout.startswith("dp") else 1
    for name in ("experts.gate.weight", "experts.up.weight", "experts.down.weight"):
        stacked = torch.cat([of_rank[name] for *_, of_rank in found])
        torch.testing.assert_close(stacked, times * gradients[name], rtol=1e-11, atol=1e-11)
    router = sum(of_rank["router.weight"] for *_, of_rank in found)
    torch.testing.assert_close(router, times * gradients["router.weight"], rtol=1e-11, atol=1e-11)


def test_a_mesh_for_a_dense_model_has_no_axes_of_experts() -> None:
    assert run_ranks(2, dense_mesh) == ["this mesh was made for a model without experts, and has no axis ep"] * 2


def dense_mesh(rank: int, world: int) -> str:
    try:
        return str(Mesh.of(Layout(dp=2), torch.device("cpu")).ep)
    except AttributeError as error:
        return str(error)
