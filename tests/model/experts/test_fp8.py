"""8-bit experts, here by their definition; on a GPU by its kernels (tests/gpu/test_cuda.py)."""

import pytest
import torch

from fivefold.job.reading import read_job
from fivefold.model.fp8 import Fp8GroupedLinear, round_rows
from fivefold.model.grouped import GroupedLinear, Groups

SIZES = (30, 0, 1, 33)


def test_products_are_off_by_the_formats_rounding_and_the_weights_gradient_is_not() -> None:
    """e4m3 has 3 bits behind the point: half a step is 2^-4 at most, and errors add as noise."""
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 96, generator=random), torch.randn(len(SIZES) * 48, 96, generator=random)
    slope, groups = torch.randn(64, 48, generator=random), Groups.of(SIZES, x.device)
    results = []
    for product in (GroupedLinear, Fp8GroupedLinear):
        given = [one.clone().requires_grad_() for one in (x, weight)]
        y = product.apply(*given, groups.ends, groups.sizes, None)
        y.backward(slope)
        results.append([y.detach(), given[0].grad, given[1].grad])
    for exact, found in zip(results[0][:2], results[1][:2], strict=True):
        assert 1e-3 < (found - exact).norm() / exact.norm() < 2**-4
    torch.testing.assert_close(results[1][2], results[0][2], rtol=0, atol=0)


def test_a_row_is_rounded_the_same_beside_any_others() -> None:
    rows = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    small, by = round_rows(rows * torch.tensor([1.0, 1e-9, 1e9, 0.0, 1.0])[:, None])
    alone, one = round_rows(rows[:1])
    assert torch.equal(small[:1].float(), alone.float())
    assert by[0] == one[0]
    assert not small.float().isnan().any()
    assert small[1].float().abs().max() == small[2].float().abs().max() == torch.finfo(small.dtype).max


def test_weights_gradients_can_be_put_off() -> None:
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    works, groups = [], Groups.of((4, 0), x.device)
    Fp8GroupedLinear.apply(x, weight, groups.ends, groups.sizes, lambda: works.append).sum().backward()
    assert weight.grad is None
    assert works[0]().shape == weight.shape


@pytest.mark.parametrize(("words", "said"), [
    ("model=tiny train.dtype=bfloat16", "for experts, and tiny has none"),
    ("model=tiny-moe train.dtype=float32", "rounds from train.dtype=bfloat16, not float32"),
    ("model=tiny-moe train.dtype=bfloat16 model.experts.ffn=72", "multiples of 16, not model.experts.ffn=72"),
    ("model=tiny-moe train.dtype=bfloat16", ""),
])  # fmt: skip
def test_what_8_bit_experts_ask_for(words: str, said: str) -> None:
    problems = read_job(None, [*words.split(), "train.fp8_experts=true"]).problems(world=1)
    assert said in "; ".join(problems)
    assert bool(problems) == bool(said)
