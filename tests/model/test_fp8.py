"""Products of 8-bit floats, here by their definition; on a GPU by its kernels (tests/gpu/test_cuda.py)."""

import pytest
import torch

from fivefold.job.reading import read_job
from fivefold.model.fp8 import GRADS, VALUES, fp8_linear, to_fp8


def test_products_are_off_by_the_formats_roundings() -> None:
    """e4m3 has 3 bits behind the point, e5m2 has 2: half a step is 2^-4 and 2^-3 at most, and errors add as noise."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64, 128).requires_grad_(), torch.randn(96, 128).requires_grad_()
    slope = torch.randn(4, 64, 96)
    exact = [x @ weight.T, slope @ weight, slope.flatten(0, 1).T @ x.flatten(0, 1)]
    y = fp8_linear(x, weight, None)
    y.backward(slope)
    assert x.grad is not None
    assert weight.grad is not None
    for found, wanted, most in zip((y, x.grad, weight.grad), exact, (2**-4, 2**-3, 2**-3), strict=True):
        error = (found - wanted).norm() / wanted.norm()
        assert 1e-3 < error < most


def test_no_8_bit_copy_of_the_weight_waits_for_the_backward_pass() -> None:
    """It would outlive the weight that ZeRO 3 has gathered, once for every microbatch."""
    x, weight = torch.randn(16, 32).requires_grad_(), torch.randn(48, 32).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        fp8_linear(x, weight, None)
    large = {(tuple(one.shape), one.dtype) for one in kept if one.numel() > 1}
    assert large == {((16, 32), VALUES), ((48, 32), torch.float32)}


@pytest.mark.parametrize("kind", [VALUES, GRADS])
def test_the_largest_value_becomes_the_formats_largest(kind: torch.dtype) -> None:
    x = torch.tensor([[0.001, -0.004, 0.0]])
    small, by = to_fp8(x, kind)
    assert small.float().abs().max() == torch.finfo(kind).max
    assert torch.allclose(small.float() * by, x, rtol=0.13)
    nothing, by = to_fp8(torch.zeros(2, 2), kind)
    assert not nothing.float().any()
    assert torch.isfinite(by)


@pytest.mark.parametrize(("changes", "words"), [
    (["train.dtype=float32"], "rounds from train.dtype=bfloat16, not float32"),
    (["layout=tp=2"], "is for layouts with tp=1, not tp=2"),
    (["layout=pp=2,microbatches=2,schedule=zb-h1"], "not zb-h1; nearest: schedule=1f1b"),
    (["model.ffn=100"], "multiples of 16, not ffn=100"),
])  # fmt: skip
def test_what_it_cannot_do_is_said(changes: list[str], words: str) -> None:
    job = read_job(None, ["model=tiny", "train.fp8=true", "train.dtype=bfloat16", *changes])
    assert any(words in problem for problem in job.problems())
    assert not read_job(None, ["model=tiny", "train.fp8=true", "train.dtype=bfloat16"]).problems()
