"""The head and the loss in one pass, against the loss as it is defined, over logits that all exist."""

import pytest
import torch

from fivefold.layout import logit_slices
from fivefold.layout.logit_slices import slices
from fivefold.losses.cross_entropy import CrossEntropy
from fivefold.model.linear_cross_entropy import Targets, Vocabulary, linear_cross_entropy, loss_sum

E, V = 16, 37


def given(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 11, E, dtype=dtype), torch.randn(V, E, dtype=dtype)
    targets, mask = torch.randint(0, V, (3, 11)), torch.rand(3, 11) > 0.3
    return x.requires_grad_(), weight.requires_grad_(), targets, mask


@pytest.mark.parametrize("logits_at_a_time", [5 * V, 7 * V, 10**6])
@pytest.mark.parametrize(
    "extras", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"label_smoothing": 0.2, "z_loss": 0.1}]
)
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, logits_at_a_time: int, extras: dict[str, float]
) -> None:
    monkeypatch.setattr(logit_slices, "MAX_LOGITS", logits_at_a_time)
    monkeypatch.setattr(logit_slices, "TILE_ROWS", 1)
    x, weight, targets, mask = given(torch.float64)
    found = linear_cross_entropy(x, weight, Targets(targets, mask, CrossEntropy(**extras)), Vocabulary(V))
    (found / 7).backward()  # what comes back is not 1
    gradients = x.grad, weight.grad
    x.grad = weight.grad = None
    wanted = loss_sum(x @ weight.T, targets, mask, CrossEntropy(**extras))
    (wanted / 7).backward()
    assert torch.allclose(found, wanted, rtol=1e-13)
    for mine, theirs in zip(gradients, (x.grad, weight.grad), strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-13)


def test_a_sure_answer_leaves_a_small_slope_that_bfloat16_does_not_lose() -> None:
    """p - 1 is taken before it is rounded: 1 - 2^-11 is 1 in bfloat16."""
    x = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[7.625], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(
        x, weight, Targets(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)), Vocabulary(2)
    ).backward()
    assert weight.grad is not None
    assert weight.grad[0].item() == pytest.approx(-1 / (1 + 2.718281828**7.625), rel=2**-7)


def test_several_slices_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_slices, "MAX_LOGITS", 2 * V)
    monkeypatch.setattr(logit_slices, "TILE_ROWS", 1)
    x, weight, targets, mask = given(torch.bfloat16)
    linear_cross_entropy(x, weight, Targets(targets, mask), Vocabulary(V)).backward()
    exact, table = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss_sum(exact @ table.T, targets, mask).backward()
    assert weight.grad is not None
    assert table.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    error = (weight.grad.double() - table.grad).norm() / table.grad.norm()
    assert error < 2**-7  # of rounding logits and slopes; sums in bfloat16 would add one rounding for each slice


def test_what_comes_back_is_not_rounded_to_bfloat16() -> None:
    """1 / 14413 in bfloat16 is 0.3% too large, and would scale every gradient so."""
    x, weight, targets, mask = given(torch.bfloat16)
    whole, part = (linear_cross_entropy(x, weight, Targets(targets, mask), Vocabulary(V)) for _ in range(2))
    (gradient,) = torch.autograd.grad(whole, weight)
    (small,) = torch.autograd.grad(part / 14413, weight)
    scale = (small.double() * gradient.double()).sum() / gradient.double().square().sum()
    assert scale.item() * 14413 == pytest.approx(1.0, abs=1e-3)


def test_nothing_is_kept_where_nothing_is_learned() -> None:
    x, weight, targets, mask = given(torch.float64)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, Targets(targets, mask), Vocabulary(V))
    assert not loss.requires_grad
    assert torch.allclose(loss, loss_sum(x @ weight.T, targets, mask))


def test_slices_cover_all_tokens_and_no_tokens() -> None:
    assert [len(part) for part in slices(2560, 2**19)] == [512] * 5  # whole tiles
    assert [len(part) for part in slices(16384, 151936)] == [2048] * 8
    assert [len(part) for part in slices(1000, 2**20)] == [256, 256, 256, 232]
    assert slices(8192, 1000) == (range(8192),)
    assert slices(0, 1000) == (range(0),)
