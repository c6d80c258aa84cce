"""Muon on one device: its Newton-Schulz, which parameters it updates and how, what a class of its kind must have."""

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fivefold.optim.base import OptimizerConfig
from fivefold.optim.muon import QUINTIC_COEFFICIENTS, Muon, orthogonalise
from fivefold.optim.plain_muon import PlainMuon
from fivefold.spec.blocks import Experts
from fivefold.spec.presets import preset
from fivefold.verifier.compare import NOISE_FACTOR
from tests.optim.test_optimizer import SPEC, backward, made


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_newton_schulz_maps_singular_values_by_its_polynomial_and_leaves_the_vectors() -> None:
    g = drawn(3, 6, 10)
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    a, b, c = QUINTIC_COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    expected = u @ torch.diag_embed(s) @ v
    torch.testing.assert_close(orthogonalise(g.clone(), 5, 1e-7), expected, rtol=0, atol=1e-12)
    assert 0.5 < s.min() < s.max() < 1.3


def test_a_tall_matrix_is_a_wide_one_turned_and_each_of_a_batch_is_alone() -> None:
    muon, g = Muon(), drawn(3, 6, 10)
    together = muon.matrix_update(g.clone())
    torch.testing.assert_close(muon.matrix_update(g.mT.contiguous()), together.mT, rtol=0, atol=1e-12)
    for one, of_batch in zip(g, together, strict=True):
        torch.testing.assert_close(muon.matrix_update(one[None].clone())[0], of_batch, rtol=0, atol=1e-12)
    assert not muon.matrix_update(torch.zeros(1, 4, 4)).any()  # of an expert that no token chose


def test_it_is_the_muon_of_pytorch_as_far_as_bfloat16_can_say() -> None:
    """PyTorch's rounds to bfloat16 whatever it is given. Ours in bfloat16 draws the same roundings anew: its distance
    from float64 is the noise, and two runs with the same noise are within SPREAD of it (verifier/compare.py)."""
    steps, rate, decay, shape = 3, 0.02, 0.1, (24, 40)
    results = {}
    for dtype in (torch.float64, torch.bfloat16, "stock"):
        weight = torch.nn.Parameter(drawn(*shape).float() if dtype == "stock" else drawn(*shape))
        stock = torch.optim.Muon([weight], lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        muon, buffer = Muon(), torch.zeros(shape, dtype=torch.float64)
        for step in range(steps):
            gradient = drawn(*shape, seed=step + 1)
            if dtype == "stock":
                weight.grad = gradient.float()
                stock.step()
                continue
            with torch.no_grad():
                (direction,) = muon.accumulate([gradient], {"momentum_buffer": [buffer]}, step + 1)
                muon.apply([weight], muon.matrix_update(direction[None].to(dtype)).to(torch.float64), rate, decay)
        results[dtype] = weight.detach().double()
    exact, moved = results[torch.float64], (results[torch.float64] - drawn(*shape)).abs().max()
    noise = (results[torch.bfloat16] - exact).abs().max()
    assert 0 < noise < 0.05 * moved  # so a wrong factor or term would show
    assert (results["stock"] - exact).abs().max() < NOISE_FACTOR * noise


@pytest.mark.parametrize("config", [Muon(clip=0.1), Muon(nesterov=False, ns_steps=3), Muon(momentum=0.5, clip=0.0)])
def test_steps_are_those_of_the_plain_one(config: Muon) -> None:
    model, weights, optimizer = made(config, torch.float64)
    about = SPEC.parameters()
    plain = {p.name: torch.nn.Parameter(weights.masters[p.name].detach().clone()) for p in about}
    groups = [
        {"params": [plain[p.name]], "about": [p], "weight_decay": config.weight_decay if p.kind == "linear" else 0.0,
         "rule": "matrix" if p.kind == "linear" and p.layer is not None else "element"}
        for p in about
    ]  # fmt: skip
    reference = PlainMuon(groups, msgspec.structs.asdict(config) | {"lr": 0.01})
    for step in range(3):
        with weights.microbatch(last=True):
            backward(model, step)
        weights.finish_grad_sync()
        for name, master in weights.masters.items():
            assert master.grad is not None
            plain[name].grad = master.grad.clone()
        torch.nn.utils.clip_grad_norm_(plain.values(), config.clip or torch.inf)
        reference.step()
        optimizer.step(0.01, optimizer.gradient_norm())
        for name, master in weights.masters.items():
            torch.testing.assert_close(master.detach(), plain[name].detach(), rtol=0, atol=1e-13)


def test_matrices_keep_a_momentum_and_all_others_two_moments() -> None:
    spec, muon = preset("tiny-oss", layers=1, experts=Experts(count=4, top_k=2, ffn=8)), Muon()
    kept = {parameter.name: muon.states_of(parameter) for parameter in spec.parameters()}
    momentum = {name for name, states in kept.items() if states == ("momentum_buffer",)}
    linears = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.router", "mlp.experts.gate",
               "mlp.experts.up", "mlp.experts.down")  # fmt: skip
    assert momentum == {f"layers.0.{name}.weight" for name in linears}
    assert {states for name, states in kept.items() if name not in momentum} == {("exp_avg", "exp_avg_sq")}
    assert {"embedding.weight", "head.weight", "layers.0.attention.sinks", "layers.0.mlp.experts.up.bias"} <= set(kept)


def test_weights_in_bfloat16_are_those_of_their_masters() -> None:
    model, weights, optimizer = made(Muon(), torch.bfloat16)
    before = {name: master.detach().clone() for name, master in weights.masters.items()}
    with weights.microbatch(last=True):
        backward(model, 0)
    weights.finish_grad_sync()
    optimizer.step(0.01, optimizer.gradient_norm())
    assert all(not torch.equal(master, before[name]) for name, master in weights.masters.items())
    assert all(torch.equal(p, weights.masters[name].to(p.dtype)) for name, p in model.named_parameters())


def test_what_a_rule_of_matrices_lacks_is_named() -> None:
    class Halved(OptimizerConfig, frozen=True, tag="mine:Halved"):
        unit = "matrix"

    class Whole(Muon, frozen=True, tag="mine:Whole"):
        unit = "element"

    class Row(Muon, frozen=True, tag="mine:Row"):
        unit = "row"  # type: ignore[assignment]

    lacks = {kind: " ".join(kind.shortcomings(kind, f"mine:{kind.__name__}")) for kind in (Halved, Whole, Row)}
    assert "no method matrix_update(self, matrices)" in lacks[Halved]
    assert 'is called if it has unit="matrix"' in lacks[Whole]
    assert "has unit='row'" in lacks[Row]
    assert not [*Muon.shortcomings(Muon, "muon")]


@pytest.mark.parametrize(
    ("setting", "words"),
    [({"momentum": 1.0}, "momentum=1.0"), ({"ns_steps": 0}, "ns_steps=0"), ({"eps": 0.0}, "eps=0.0")],
)
def test_settings_have_bounds(setting: dict[str, float], words: str) -> None:
    problem = next(problem for holds, problem in Muon(**setting).rules() if not holds)
    assert problem.startswith(f"optimizer.{words} must")


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (8, 8)])
def test_flops_are_those_that_pytorch_counts(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counted:
        Muon().matrix_update(torch.randn(2, *shape))
    assert counted.get_total_flops() == 2 * Muon().matrix_flops(*shape)
