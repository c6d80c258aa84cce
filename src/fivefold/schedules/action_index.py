"""`ActionIndex` says where each action of a schedule stands, for the proofs; `ScheduleProblem` is what they find."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from fivefold.schedules.actions import ALL_MICROBATCHES, BACKWARD, COLLECTIVES, INPUT_GRAD, WEIGHT_GRAD, Action, Kind
from fivefold.schedules.clock import ClockRun, run
from fivefold.schedules.costs import Costs
from fivefold.schedules.schedule import Schedule

NO_PLACE = -1
Row = list[int]  # by microbatch


class ScheduleProblem(NamedTuple):
    """A broken obligation: a sentence with rank, action and cause, and where to look."""

    sentence: str
    rank: int | None = None
    place: int | None = None  # in the rank's list, counted from 0
    obligation: str = ""

    def __str__(self) -> str:
        return f"{self.obligation}: {self.sentence}" if self.obligation else self.sentence


class ActionIndex:
    """The places of a schedule's actions.

    `places[kind, stage][microbatch]` is the place in the list of the rank that runs it; `sequence[kind, stage]` has the
    microbatches in the order they come in. Actions that cannot be placed (a foreign stage, a second copy) are put aside
    in `unplaced` as (rank, place, action), for `complete` to name.
    """

    def __init__(self, schedule: Schedule, numbers: Sequence[Sequence[int]] | None = None) -> None:
        self.schedule = schedule
        self.numbers = numbers  # by rank and place: how sentences count the action; None: as the list does
        self.unplaced: list[tuple[int, int, Action]] = []
        self.sequence: defaultdict[tuple[Kind, int], list[int]] = defaultdict(list)
        self.for_all: defaultdict[tuple[Kind, int], list[int]] = defaultdict(list)  # places of GATHER3, REDUCE3, STEP3
        self._places: dict[tuple[Kind, int], Row] = {}
        for rank in range(schedule.p):
            self._read(rank)

    def _read(self, rank: int) -> None:
        m, places, sequence, of_rank = self.schedule.m, self._places, self.sequence, self.schedule.placement.of_rank
        own = set(of_rank[rank] if rank < len(of_rank) else ())
        for place, action in enumerate(self.schedule.ranks[rank]):
            kind, stage, microbatch, _ = action
            if microbatch == ALL_MICROBATCHES and kind in COLLECTIVES and stage in own:
                self.for_all[kind, stage].append(place)
                continue
            row = places.get((kind, stage))
            if row is None:
                row = places[kind, stage] = [NO_PLACE] * m
            if stage not in own or not 0 <= microbatch < m or row[microbatch] != NO_PLACE:
                self.unplaced.append((rank, place, action))
                continue
            row[microbatch] = place
            sequence[kind, stage].append(microbatch)

    def place_text(self, rank: int, place: int) -> str:
        """How a sentence names a place: 'action 7'."""
        return f"action {place if self.numbers is None else self.numbers[rank][place]}"

    def action_text(self, rank: int, place: int) -> str:
        """How a sentence names an action and its place: 'F0.1 (action 7)'."""
        return f"{self.schedule.ranks[rank][place]} ({self.place_text(rank, place)})"

    def places(self, kind: Kind, stage: int) -> Row:
        """By microbatch, the place of an action in its rank's list, or ABSENT."""
        return self._places.get((kind, stage)) or [NO_PLACE] * self.schedule.m

    def input_gradients(self, stage: int) -> Row:
        """By microbatch, where the gradient of the stage's input is made: its B or its I."""
        return _either(self.places(BACKWARD, stage), self.places(INPUT_GRAD, stage))

    def weight_gradients(self, stage: int) -> Row:
        """By microbatch, where the stage's weight gradient is made: its B or its W."""
        return _either(self.places(BACKWARD, stage), self.places(WEIGHT_GRAD, stage))

    @cached_property
    def run(self) -> ClockRun:
        """The schedule on the clock of `Bounds.slots`. Only for schedules that are complete and in order."""
        return run(self.schedule, Costs.slots(self.schedule.placement))


def _either(first: Row, second: Row) -> Row:
    return [a if a != NO_PLACE else b for a, b in zip(first, second, strict=True)]
