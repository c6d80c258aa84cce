"""Reads the words of a schedule file into a `Schedule`; what cannot be read is named with its line and the reason.

reader = ScheduleReader("mine.txt")
reader.line("line 1", ["stages", "0", "1"])     # or, of JSON, header, begin_rank and actions
reader.finish().schedule
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from fivefold.schedules.actions import ALL_MICROBATCHES, MESSAGE_KINDS, Action, parse_token
from fivefold.schedules.communication import wire
from fivefold.schedules.schedule import Bounds, Placement, Schedule, name_problem
from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean, whole_number

FILE_KEYS = ("schedule", "stages", "microbatches", "buffers", "peak", "slots", "messages")


class ReadSchedule(NamedTuple):
    """A schedule, and where in the file each rank and each of its actions was read, such as "line 12"."""

    schedule: Schedule
    rank_places: list[str]
    action_places: list[list[str]]
    numbers: list[list[int]]  # by rank and action, its number in the file; implied messages are not counted there

    def place(self, rank: int | None, action: int | None) -> str | None:
        """Where an action, or else its rank, was read."""
        if rank is None or rank >= len(self.rank_places):
            return None
        if action is not None and 0 <= action < len(self.action_places[rank]):
            return self.action_places[rank][action]
        return self.rank_places[rank]


class ScheduleReader:
    """Collects a schedule piece by piece, and every problem with it. `where` is how the user finds the piece."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[str] = []
        self.values: dict[str, list[str]] = {}
        self.places: dict[str, str] = {}  # key -> where it stands
        self.rank_places: dict[int, str] = {}
        self.tokens: dict[int, list[tuple[str, str]]] = {}  # rank -> (where, token)
        self.rank: int | None = None

    def line(self, where: str, words: list[str]) -> None:
        """One line of the text form, without its comment."""
        if not words:
            return
        if words[0] == "rank":
            self.begin_rank(where, words[1:])
        elif words[0].islower():
            self.header(where, words[0], words[1:])
        else:
            self.actions(where, words)

    def header(self, where: str, key: str, words: list[str]) -> None:
        """The value of a key."""
        if key not in FILE_KEYS:
            self.refuse(where, f"unknown key {key!r}; {did_you_mean(key, [*FILE_KEYS, 'rank'])}")
        elif key in self.values:
            self.refuse(where, f"{key} is given for the second time")
        else:
            self.values[key], self.places[key] = words, where

    def begin_rank(self, where: str, words: list[str]) -> None:
        """The actions that follow are of this rank."""
        number = whole_number(words[0]) if len(words) == 1 else None
        if number is None:
            self.refuse(where, f"'rank {' '.join(words)}' should be 'rank' and one number; its actions go below it")
            self.rank = None
            return
        self.rank = number
        if self.rank in self.tokens:
            self.refuse(where, f"rank {self.rank} is given for the second time")
        self.rank_places.setdefault(self.rank, where)
        self.tokens.setdefault(self.rank, [])

    def actions(self, where: str, words: list[str]) -> None:
        """Actions of the rank that was begun last."""
        if self.rank is not None:
            self.tokens[self.rank] += [(where, word) for word in words]
        elif not self.tokens:
            self.refuse(where, f"{words[0]!r} stands before any 'rank' line, so it is not clear who runs it")

    def finish(self) -> ReadSchedule:
        """The schedule, or an error with all problems."""
        owner = self.read_owner()
        (microbatches,) = self.read_numbers("microbatches", count=1) or (0,)
        (buffers,) = self.read_numbers("buffers", default=[2], count=1) or (2,)
        ranks = max(owner, default=-1) + 1
        peak = self.read_numbers("peak", default=[], count=ranks or None, least=0)
        slots = self.read_numbers("slots", default=[], count=1)
        name, messages = " ".join(self.values.get("schedule", ["unnamed"])), self.values.get("messages")
        if problem := name_problem(name):
            self.refuse(self.places["schedule"], problem)
        implied = messages is not None
        if messages not in (None, ["implied"]):
            self.refuse(self.places["messages"], "the only value of messages is 'implied'; without it, list them")
        self.check_ranks(ranks)
        read = [self.read_order(rank, len(owner), microbatches, implied=implied) for rank in range(ranks)]
        listed = sum(map(len, read))
        if not self.problems and microbatches > listed:
            where = self.places["microbatches"]
            self.refuse(where, f"there cannot be {microbatches} microbatches, with {listed} actions in total")
        if self.problems:
            raise UserError(self.problems, "schedule.text")

        promise = Bounds(tuple(peak) if peak else None, slots[0] if slots else None)
        orders = tuple(tuple(action for _, action in order) for order in read)
        schedule = Schedule(name, Placement(tuple(owner)), microbatches, orders, buffers, promise)
        if implied:
            schedule = wire(name, schedule.placement, microbatches, orders, buffers=buffers, promise=promise)
        numbers = [_numbers_in_file(actions, implied=implied) for actions in schedule.ranks]
        rank_places = [self.rank_places[rank] for rank in range(ranks)]
        action_places = [
            [order[n][0] if order else where for n in in_file]  # where the rank lists nothing, its own line
            for order, where, in_file in zip(read, rank_places, numbers, strict=True)
        ]
        return ReadSchedule(schedule, rank_places, action_places, numbers)

    def check_ranks(self, ranks: int) -> None:
        """Note which ranks own a stage and list no actions, or list actions and own no stage."""
        for rank in range(ranks):
            if rank not in self.tokens:
                self.problems.append(f"{self.source}: rank {rank} owns a stage, and there is no 'rank {rank}' line")
        for rank, where in self.rank_places.items():
            if rank >= ranks > 0:
                self.refuse(where, f"rank {rank} owns no stage; the stages live on ranks 0 to {ranks - 1}")

    def read_owner(self) -> list[int]:
        """The rank of each stage; empty, with the problem noted, when ranks are left out."""
        owner = self.read_numbers("stages", least=0)
        last = max(owner, default=-1)
        if len(set(owner)) != last + 1:
            self.refuse(self.places["stages"], f"stages: each rank from 0 to {last} must own at least one")
            return []
        return owner

    def read_numbers(
        self, key: str, default: list[int] | None = None, count: int | None = None, least: int = 1
    ) -> list[int]:
        """The whole numbers of a key; empty, with the problem noted, when they cannot be read."""
        if key not in self.values:
            if default is None:
                self.problems.append(f"{self.source}: there is no {key!r} line")
            return default or []
        words, where = self.values[key], self.places[key]
        if not words or (count is not None and len(words) != count):
            self.refuse(where, f"{key} needs {'numbers' if count is None else count}, and has {len(words)}")
            return []
        numbers = []
        for word in words:
            number = whole_number(word)
            if number is None or number < least:
                self.refuse(where, f"{key}: {word!r} is not a whole number of {least} or more")
                return []
            numbers.append(number)
        return numbers

    def read_order(self, rank: int, stages: int, microbatches: int, *, implied: bool) -> list[tuple[str, Action]]:
        """A rank's actions, each with where it was read; every problem with them is noted."""
        read: list[tuple[str, Action]] = []
        for where, token in self.tokens.get(rank, []):
            try:
                actions = parse_token(token)
            except ValueError as error:
                self.refuse(where, str(error))
                continue
            for action in actions:
                if stages and action.stage >= stages:
                    self.refuse(where, f"{action} is of stage {action.stage}, and stages go from 0 to {stages - 1}")
                if microbatches and action.microbatch != ALL_MICROBATCHES and action.microbatch >= microbatches:
                    self.refuse(where, f"{action}: microbatches go from 0 to {microbatches - 1}")
                if implied and action.kind in MESSAGE_KINDS:
                    self.refuse(where, f"{action} is listed, and messages are implied; leave out one or the other")
                read.append((where, action))
        return read

    def refuse(self, where: str, sentence: str) -> None:
        """Note a problem, with the place of what it is about."""
        self.problems.append(f"{self.source}, {where}: {sentence}")


def _numbers_in_file(actions: Sequence[Action], *, implied: bool) -> list[int]:
    """The number in the file of each action; an implied message has the number of the action before it."""
    if not implied:
        return list(range(len(actions)))
    counts = accumulate(action.kind not in MESSAGE_KINDS for action in actions)
    return [max(0, count - 1) for count in counts]
