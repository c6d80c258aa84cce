"""Learning rates, step by step."""

from itertools import pairwise

import pytest

from fivefold.optim.adamw import AdamW
from fivefold.optim.lr_schedule import learning_rate


def rates(steps: int, **settings) -> list[float]:
    config = AdamW(lr=1.0, **settings)
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates(8, warmup=4, schedule="constant") == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_cosine_falls_to_the_final_rate_at_the_last_step() -> None:
    curve = rates(101, warmup=1, final=0.1)
    assert curve[50] == pytest.approx(0.55)
    assert curve[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(curve[1:]))


def test_wsd_is_flat_and_then_falls() -> None:
    curve = rates(10, warmup=2, schedule="wsd", decay=0.3, final=0.0)
    assert curve[:7] == [0.5, 1, 1, 1, 1, 1, 1]
    assert curve[7:] == pytest.approx([2 / 3, 1 / 3, 0])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(("steps", "warmup", "decay"), [(1, 0, 0.2), (3, 9, 1.0), (5, 5, 0.0), (1, 1, 1.0)])
def test_short_runs_have_a_rate_at_every_step(schedule: str, steps: int, warmup: int, decay: float) -> None:
    assert all(0 <= rate <= 1 for rate in rates(steps, schedule=schedule, warmup=warmup, decay=decay))
