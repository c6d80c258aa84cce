"""Ways to break a schedule."""

from collections.abc import Callable
from dataclasses import replace

from fivefold.schedules.actions import Action
from fivefold.schedules.schedule import Schedule

Order = list[Action]


def edited(schedule: Schedule, rank: int, edit: Callable[[Order], object]) -> Schedule:
    """The schedule with one rank's list edited in place."""
    orders = [list(order) for order in schedule.ranks]
    edit(orders[rank])
    return replace(schedule, ranks=tuple(map(tuple, orders)))


def find(schedule: Schedule, token: str) -> tuple[int, int]:
    """Rank and place of an action by its text."""
    for rank, order in enumerate(schedule.ranks):
        for place, action in enumerate(order):
            if str(action) == token:
                return rank, place
    raise LookupError(token)


def drop(schedule: Schedule, rank: int, place: int) -> Schedule:
    return edited(schedule, rank, lambda order: order.pop(place))


def duplicate(schedule: Schedule, rank: int, place: int, at: int) -> Schedule:
    return edited(schedule, rank, lambda order: order.insert(at, order[place]))


def swap(schedule: Schedule, rank: int, one: int, other: int) -> Schedule:
    def exchange(order: Order) -> None:
        order[one], order[other] = order[other], order[one]

    return edited(schedule, rank, exchange)


def move(schedule: Schedule, rank: int, place: int, to: int) -> Schedule:
    """Take an action out and put it back at another place of the same rank."""
    return edited(schedule, rank, lambda order: order.insert(to, order.pop(place)))


def hand_over(schedule: Schedule, rank: int, place: int, other: int) -> Schedule:
    """Give an action to another rank."""
    action = schedule.ranks[rank][place]
    return edited(drop(schedule, rank, place), other, lambda order: order.insert(min(place, len(order)), action))


def before(schedule: Schedule, token: str, other: str) -> Schedule:
    """Move an action right before another one of the same rank."""
    rank, place = find(schedule, token)
    same, to = find(schedule, other)
    assert rank == same
    return move(schedule, rank, place, to - (place < to))
