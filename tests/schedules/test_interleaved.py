"""The group size N of interleaved schedules: what it buys, and where it must not go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.schedules.check import check
from fivefold.schedules.classic import interleaved_unchecked, legal_groups
from fivefold.schedules.costs import Costs, MessageLink
from fivefold.schedules.registry import build
from fivefold.schedules.simulate import simulate
from fivefold.support.errors import UserError
from tests.schedules.brute import trouble


def test_megatron_order_of_two_ranks() -> None:
    schedule = build("interleaved", 2, 2, chunks=2)
    assert " ".join(map(str, schedule.compute(1))) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"


def test_a_larger_group_hides_messages() -> None:
    def bubble(group: int) -> float:
        schedule = build("interleaved", 8, 32, chunks=4, group=group)
        return simulate(schedule, Costs.even(schedule.placement, link=MessageLink(latency=0.1))).makespan - 3 * 32

    assert bubble(8) == pytest.approx(11.45)
    assert bubble(16) == pytest.approx(6.65)


def test_a_short_last_group_doubles_the_bubble_and_the_checker_says_so() -> None:
    schedule = interleaved_unchecked(4, 9, 2, group=4)
    assert simulate(schedule).makespan - 27 > 2 * 4.5
    (problem,) = check(schedule)
    assert problem.obligation == "bounds"
    assert "rank 0 ends with B0.8 after 74 slots, and 63 are promised" in problem.sentence


@pytest.mark.parametrize(("p", "m", "v", "group"), [(8, 32, 4, 10), (8, 32, 4, 7), (4, 8, 2, 3), (8, 32, 2, 3)])
def test_a_wrong_group_deadlocks_and_the_checker_names_the_circle(p: int, m: int, v: int, group: int) -> None:
    schedule = interleaved_unchecked(p, m, v, group)
    assert trouble(schedule) == "deadlock"
    (problem,) = check(schedule)
    assert problem.obligation == "deadlock"
    assert "nobody in it can move" in problem.sentence
    with pytest.raises(UserError, match="deadlocks: rank"):
        simulate(schedule)


def test_a_group_below_p_need_not_deadlock_but_then_it_costs_and_is_refused_for_that() -> None:
    schedule = interleaved_unchecked(2, 4, 2, group=1)
    assert trouble(schedule) is None
    assert [problem.obligation for problem in check(schedule)] == ["bounds"]


@given(st.integers(2, 6), st.integers(1, 20), st.integers(2, 4), st.integers(1, 20))
def test_a_group_is_legal_exactly_when_the_checker_accepts_it(p: int, m: int, v: int, group: int) -> None:
    group = min(group, m)
    refused = bool(check(interleaved_unchecked(p, m, v, group)))
    assert refused == (m < p or group not in legal_groups(p, m))


@pytest.mark.parametrize(
    ("m", "group", "reason"),
    [
        (32, 10, "leaves a last group of 2 of the 32 microbatches, fewer than p=8"),
        (32, 4, "is below p=8"),
        (32, 64, "is above the number of microbatches, 32"),
    ],
)
def test_a_group_out_of_range_is_refused_with_the_nearest(m: int, group: int, reason: str) -> None:
    with pytest.raises(UserError, match=rf"group size N={group} {reason}.*; use N="):
        build("interleaved", 8, m, chunks=4, group=group)


def test_uneven_microbatches_take_the_smallest_group_that_works() -> None:
    schedule = build("interleaved", 4, 9, chunks=2)
    assert schedule == build("interleaved", 4, 9, chunks=2, group=5)
    assert simulate(schedule).makespan - 27 == pytest.approx(4.5)
