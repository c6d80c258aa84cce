"""Grouped matmuls against a loop, forward and backward, with empty groups and none but one row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fivefold.model.grouped import DeferWgrad, GroupedLinear, Groups, _kernel_runs
from fivefold.model.recompute import recomputed


def linear(
    x: Tensor, weight: Tensor, groups: Groups, defer_wgrad: Callable[[], DeferWgrad | None] | None = None
) -> Tensor:
    return GroupedLinear.apply(x, weight, groups.ends, groups.sizes, defer_wgrad)


SIZES = [(3, 0, 5, 1), (0, 0, 0, 4), (0, 0, 0, 0), (1, 0, 0, 0), (9, 9, 9, 9)]


@pytest.mark.parametrize("known", [True, False])  # to the host
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("dtype", "width", "bound"),
    [(torch.float64, 6, 1e-12), (torch.float32, 16, 1e-5), (torch.float32, 7, 1e-5), (torch.bfloat16, 16, 2e-2)],
)
def test_it_is_a_loop_over_groups(
    known: bool, sizes: tuple[int, ...], dtype: torch.dtype, width: int, bound: float
) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), width, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes) * 8, width, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    groups = Groups.of(sizes, x.device)
    y = linear(x, weight, groups if known else Groups(groups.ends))
    gradient = torch.randn(y.shape, generator=random, dtype=torch.float64).to(dtype)
    y.backward(gradient)
    got = [y.detach(), x.grad, weight.grad]
    exact, stack = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    rows = exact.split(sizes)
    wanted = torch.cat([part @ one.T for part, one in zip(rows, stack.unflatten(0, (len(sizes), 8)), strict=True)])
    wanted.backward(gradient.double())
    for mine, theirs in zip(got, [wanted.detach(), exact.grad, stack.grad], strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.shape == theirs.shape
        assert not mine.isnan().any()
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=bound * max(1.0, float(gradient.abs().sum())))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(30, 30, 16), (30, 16, 30), (7, 7, 7)])
def test_as_many_rows_as_an_odd_width_are_no_exception(rows: int, inputs: int, outputs: int) -> None:
    x, weight = (torch.ones(n, inputs, requires_grad=True) for n in (rows, 2 * outputs))
    linear(x, weight, Groups.of((rows - 1, 1), x.device)).sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [rows - 1.0] * outputs + [1.0] * outputs


def test_a_gradient_without_strides_is_taken() -> None:
    x = torch.ones(4, 16, requires_grad=True)
    weight = torch.ones(2 * 16, 16, requires_grad=True)
    linear(x, weight, Groups.of((1, 3), x.device)).sum().backward()
    assert weight.grad is not None
    assert weight.grad[0, 0] == 1.0
    assert weight.grad[-1, 0] == 3.0


def test_the_gradient_of_weights_can_be_put_off() -> None:
    works = []
    x = torch.ones(4, 16, requires_grad=True)
    weight = torch.ones(2 * 16, 16, requires_grad=True)
    linear(x, weight, Groups.of((4, 0), x.device), lambda: works.append).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    (work,) = works
    assert work().unflatten(0, (2, 16)).sum((1, 2)).tolist() == [4.0 * 16 * 16, 0.0]


def test_the_trial_of_the_kernel_is_unseen_by_recomputation() -> None:
    _kernel_runs.cache_clear()
    x, weight = (torch.ones(n, 16, requires_grad=True) for n in (4, 32))

    def steps(x: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, Groups.of((1, 3), x.device)).square()

    recomputed("selective")(steps, x).sum().backward()
    assert weight.grad is not None
    assert weight.grad[0, 0] == 2 * 16
