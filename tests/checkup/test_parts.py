"""The time of a checkup's parts."""

import math

import pytest

from fivefold.checkup.parts import NAMES, PARTS, Budget, check_minutes, chosen_parts
from fivefold.support.errors import UserError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("minutes", [0.5, 5, 60])
def test_parts_that_take_all_they_may_stay_within_the_whole(minutes: float) -> None:
    clock = Clock()
    budget = Budget(minutes, clock=clock)
    for part in PARTS:
        clock.now += budget.limit(part)
    assert budget.spent <= 60 * minutes


def test_what_a_part_leaves_the_later_ones_have() -> None:
    clock = Clock()
    budget = Budget(10, clock=clock)
    shares = budget.planned()
    assert sum(shares.values()) == pytest.approx(595)
    assert next(budget.share(part) for part in PARTS) == pytest.approx(shares["machines"])
    clock.now += 1  # of the first part
    assert budget.share(PARTS[1]) > shares["proofs"]
    assert budget.share(PARTS[-1]) == pytest.approx(594)
    assert all(budget.share(part) <= budget.limit(part) <= budget.left for part in PARTS)
    clock.now += 1000
    assert [budget.limit(part) for part in PARTS] == [0.0] * len(PARTS)


def test_minutes_that_make_no_sense_are_refused() -> None:
    for minutes in (0, -1, 1e9, math.nan, math.inf):
        with pytest.raises(UserError, match=r"is not between 0\.5 and 1440; 10 are enough"):
            check_minutes(minutes)


def test_parts_are_left_out_by_their_names() -> None:
    assert [part.name for part in chosen_parts("proofs, layouts")] == ["machines", "lost-rank", "calibration"]
    assert chosen_parts("") == PARTS
    with pytest.raises(UserError, match="--skip proof names no part; did you mean 'proofs'"):
        chosen_parts("proof")
    with pytest.raises(UserError, match="leaves no part of machines"):
        chosen_parts(",".join(NAMES))
