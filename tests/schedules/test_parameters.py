"""GATHER, REDUCE and STEP: each stage has its own, once, and where it belongs; the checker knows."""

from collections.abc import Callable
from typing import Any

import pytest

from fivefold.schedules.actions import Action, Kind
from fivefold.schedules.check import check
from fivefold.schedules.communication import with_zero
from fivefold.schedules.registry import build
from fivefold.schedules.schedule import Schedule
from tests.schedules.mutations import before, drop, duplicate, edited, find, move

F = Kind.FORWARD
ONE_F_ONE_B = build("1f1b", 4, 8)


def verdict(schedule: Schedule) -> str:
    """The first problem, as people read it."""
    problems = check(schedule)
    assert problems, "the checker accepts it"
    return str(problems[0])


@pytest.mark.parametrize(
    ("token", "to", "cause"),
    [
        ("GATHER1", "last", "after its first forward"),
        ("REDUCE1", "first", "before its last weight gradient"),
        ("STEP1", "first", "before the gradients of the stage are final"),
    ],
)
def test_collectives_have_their_place(token: str, to: str, cause: str) -> None:
    schedule = with_zero(ONE_F_ONE_B, 1)
    assert check(schedule) == []
    rank, place = find(schedule, token)
    mutant = move(schedule, rank, place, 0 if to == "first" else len(schedule.ranks[rank]) - 1)
    assert cause in verdict(mutant)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_schedule_with_parameters_passes_and_each_of_their_actions_counts(zero: int) -> None:
    schedule = with_zero(ONE_F_ONE_B, zero)
    assert check(schedule) == []
    kinds = {Kind.GATHER, Kind.REDUCE, Kind.STEP}
    spots = [(r, n) for r, order in enumerate(schedule.ranks) for n, one in enumerate(order) if one.kind in kinds]
    for rank, place in spots:
        assert verdict(drop(schedule, rank, place)).startswith("complete: ")
        assert verdict(duplicate(schedule, rank, place, len(schedule.ranks[rank]))).startswith("complete: ")


@pytest.mark.parametrize(
    ("zero", "edit", "sentence"),
    [
        (0, lambda order: order.append(Action(Kind.STEP, 1)), "STEP1 (action 50) a second time; the first is action 4"),
        (0, lambda order: order.append(Action(Kind.STEP, 1, 3)), "STEP1.3 (action 50), and also STEP1 for all micro"),
        (0, lambda order: order.remove(Action(Kind.STEP, 1)), "never has STEP1, and the schedule takes care of"),
        (1, lambda order: order.remove(Action(Kind.GATHER, 1)), "never has GATHER1, and the schedule takes care of"),
        (2, lambda order: order.remove(Action(Kind.REDUCE, 1, 5)), "has REDUCE1.0, but never REDUCE1.5"),
        (2, lambda order: order.append(Action(Kind.REDUCE, 1)), "and also REDUCE1 for all microbatches"),
    ],
)
def test_a_stage_is_gathered_reduced_and_stepped_once(
    zero: int, edit: Callable[[list[Action]], Any], sentence: str
) -> None:
    assert sentence in verdict(edited(with_zero(ONE_F_ONE_B, zero), 1, edit))


def gathered(order: list[Action]) -> None:
    """A GATHER for every microbatch, right before its forward."""
    order[:] = [
        one for action in order for one in ([action._replace(kind=Kind.GATHER)] * (action.kind is F)) + [action]
    ]


def test_a_gather_for_each_microbatch_comes_before_its_forward() -> None:
    schedule = with_zero(build("1f1b", 1, 4), 0)
    each = edited(schedule, 0, gathered)
    assert check(each) == []
    assert "before its parameters are gathered: GATHER0.2 is" in verdict(before(each, "F0.2", "GATHER0.2"))
