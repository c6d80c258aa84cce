"""Initial values of named distributions: what they say they are, and the same in every layout."""

import math

import pytest
import torch
from torch.nn import functional as F

from fivefold.layout.sharding import Box
from fivefold.model.init import init_param
from fivefold.spec.operations import Initial, Parameter
from fivefold.spec.presets import preset

A_LOG = Initial("uniform", 1.0, 16.0, "log")
DT_BIAS = Initial("log_uniform", 0.001, 0.1, "softplus_inverse")


def drawn(init: Initial, *shape: int, box: Box | None = None) -> torch.Tensor:
    parameter = Parameter(
        "layers.0.scan.decay", shape, "bias" if len(shape) == 1 else "filter", 0, "colwise", init=init
    )
    out = torch.empty([len(side) for side in box or map(range, shape)], dtype=torch.float64)
    init_param(preset("tiny"), parameter, out, seed=3, box=box)
    return out


def test_a_named_distribution_is_what_it_says() -> None:
    """By torch's own functions; bounds, and means within four of their own standard deviations of 4096 draws."""
    rates, steps = drawn(A_LOG, 4096).exp(), F.softplus(drawn(DT_BIAS, 4096))
    for values, low, high in ((rates, 1.0, 16.0), (steps.log(), math.log(0.001), math.log(0.1))):
        assert low <= values.min() < values.max() <= high
        spread = (high - low) / math.sqrt(12 * 4096)
        assert abs(values.mean() - (low + high) / 2) < 4 * spread
    assert torch.equal(drawn(Initial("constant", 0.5), 3, 5), torch.full((3, 5), 0.5, dtype=torch.float64))
    assert (drawn(Initial("constant", 0.5, 0.0, "softplus_inverse"), 2) - math.log(math.expm1(0.5))).abs().max() < 1e-15


@pytest.mark.parametrize("init", [A_LOG, DT_BIAS])
def test_a_rank_draws_its_part_of_a_named_distribution(init: Initial) -> None:
    """To the bit: of a vector, and of a filter cut both ways."""
    whole, filter_ = drawn(init, 60), drawn(init, 60, 7)
    for rows in (range(7), range(7, 31), range(31, 60)):
        assert torch.equal(drawn(init, 60, box=(rows,)), whole[rows.start : rows.stop])
        for columns in (range(3), range(2, 7)):
            part = filter_[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(drawn(init, 60, 7, box=(rows, columns)), part)


@pytest.mark.parametrize(
    ("init", "said"),
    [
        (Initial("gamma", 1.0, 2.0), "distribution='gamma', and known are constant, uniform, log_uniform"),  # type: ignore[arg-type]
        (Initial("uniform", 2.0, 1.0), "low=2.0, high=1.0; low must be less"),
        (Initial("log_uniform", 0.0, 1.0), "low=0.0, which has no logarithm; it must be positive"),
        (Initial("uniform", 1.0, math.inf), "low=1.0, high=inf, which are no numbers"),
        (A_LOG, ""),
    ],
)
def test_a_distribution_that_cannot_be_is_a_sentence(init: Initial, said: str) -> None:
    assert init.problem == said
