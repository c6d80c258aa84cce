"""Reads the lines of a schedule file into a `Schedule`; what cannot be read is named with its line and the reason."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from fivefold.schedule.actions import ALL, MESSAGES, Action, parse_token
from fivefold.schedule.schedule import Placement, Promise, Schedule, name_problem
from fivefold.schedule.wiring import wire
from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean, whole_number

KEYS = ("schedule", "stages", "microbatches", "buffers", "peak", "slots", "messages")


class Reading(NamedTuple):
    """A schedule, and where in the file it stands: "line 12" for each rank and for each of its actions."""

    schedule: Schedule
    rank_places: list[str]
    action_places: list[list[str]]
    numbers: list[list[int]]  # how the file counts the actions; it differs from the schedule where messages are implied

    def place(self, rank: int | None, action: int | None) -> str | None:
        """Where an action, or else its rank, was read."""
        if rank is None or rank >= len(self.rank_places):
            return None
        if action is not None and 0 <= action < len(self.action_places[rank]):
            return self.action_places[rank][action]
        return self.rank_places[rank]


class Reader:
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
        if key not in KEYS:
            self.problem(where, f"unknown key {key!r}; {did_you_mean(key, [*KEYS, 'rank'])}")
        elif key in self.values:
            self.problem(where, f"{key} is given for the second time")
        else:
            self.values[key], self.places[key] = words, where

    def begin_rank(self, where: str, words: list[str]) -> None:
        number = whole_number(words[0]) if len(words) == 1 else None
        if number is None:
            self.problem(where, f"'rank {' '.join(words)}' should be 'rank' and one number; its actions go below it")
            self.rank = None
            return
        self.rank = number
        if self.rank in self.tokens:
            self.problem(where, f"rank {self.rank} is given for the second time")
        self.rank_places.setdefault(self.rank, where)
        self.tokens.setdefault(self.rank, [])

    def actions(self, where: str, words: list[str]) -> None:
        if self.rank is not None:
            self.tokens[self.rank] += [(where, word) for word in words]
        elif not self.tokens:
            self.problem(where, f"{words[0]!r} stands before any 'rank' line, so it is not clear who runs it")

    def finish(self) -> Reading:
        owner = self.owner()
        (microbatches,) = self.numbers("microbatches", count=1) or (0,)
        (buffers,) = self.numbers("buffers", default=[2], count=1) or (2,)
        ranks = max(owner, default=-1) + 1
        peak = self.numbers("peak", default=[], count=ranks or None, least=0)
        slots = self.numbers("slots", default=[], count=1)
        name, messages = " ".join(self.values.get("schedule", ["unnamed"])), self.values.get("messages")
        if problem := name_problem(name):
            self.problem(self.places["schedule"], problem)
        implied = messages is not None
        if messages not in (None, ["implied"]):
            self.problem(self.places["messages"], "the only value of messages is 'implied'; without it, list them")
        for rank in range(ranks):
            if rank not in self.tokens:
                self.problems.append(f"{self.source}: rank {rank} owns a stage, and there is no 'rank {rank}' line")
        for rank, where in self.rank_places.items():
            if rank >= ranks > 0:
                self.problem(where, f"rank {rank} owns no stage; the stages live on ranks 0 to {ranks - 1}")
        read = [self.order(rank, len(owner), microbatches, implied) for rank in range(ranks)]
        listed = sum(map(len, read))
        if not self.problems and microbatches > listed:
            where = self.places["microbatches"]
            self.problem(where, f"there cannot be {microbatches} microbatches, with {listed} actions in total")
        if self.problems:
            raise UserError(self.problems)

        promise = Promise(tuple(peak) if peak else None, slots[0] if slots else None)
        orders = tuple(tuple(action for _, action in order) for order in read)
        schedule = Schedule(name, Placement(tuple(owner)), microbatches, orders, buffers, promise)
        if implied:
            schedule = wire(name, schedule.placement, microbatches, orders, buffers=buffers, promise=promise)
        numbers = [_numbers(actions, implied) for actions in schedule.ranks]
        rank_places = [self.rank_places[rank] for rank in range(ranks)]
        action_places = [
            [order[n][0] if order else where for n in counted]  # of a rank that lists nothing, its own line
            for order, where, counted in zip(read, rank_places, numbers, strict=True)
        ]
        return Reading(schedule, rank_places, action_places, numbers)

    def owner(self) -> list[int]:
        """The rank of each stage; empty, with the problem noted, when ranks are left out."""
        owner = self.numbers("stages", least=0)
        last = max(owner, default=-1)
        if len(set(owner)) != last + 1:
            self.problem(self.places["stages"], f"stages: each rank from 0 to {last} must own at least one")
            return []
        return owner

    def numbers(
        self, key: str, default: list[int] | None = None, count: int | None = None, least: int = 1
    ) -> list[int]:
        """The whole numbers of a key; empty, with the problem noted, when they cannot be read."""
        if key not in self.values:
            if default is None:
                self.problems.append(f"{self.source}: there is no {key!r} line")
            return default or []
        words, where = self.values[key], self.places[key]
        if not words or (count is not None and len(words) != count):
            self.problem(where, f"{key} needs {'numbers' if count is None else count}, and has {len(words)}")
            return []
        numbers = []
        for word in words:
            number = whole_number(word)
            if number is None or number < least:
                self.problem(where, f"{key}: {word!r} is not a whole number of {least} or more")
                return []
            numbers.append(number)
        return numbers

    def order(self, rank: int, stages: int, microbatches: int, implied: bool) -> list[tuple[str, Action]]:
        read: list[tuple[str, Action]] = []
        for where, token in self.tokens.get(rank, []):
            try:
                actions = parse_token(token)
            except ValueError as error:
                self.problem(where, str(error))
                continue
            for action in actions:
                if stages and action.stage >= stages:
                    self.problem(where, f"{action} is of stage {action.stage}, and stages go from 0 to {stages - 1}")
                if microbatches and action.microbatch != ALL and action.microbatch >= microbatches:
                    self.problem(where, f"{action}: microbatches go from 0 to {microbatches - 1}")
                if implied and action.kind in MESSAGES:
                    self.problem(where, f"{action} is listed, and messages are implied; leave out one or the other")
                read.append((where, action))
        return read

    def problem(self, where: str, sentence: str) -> None:
        self.problems.append(f"{self.source}, {where}: {sentence}")


def _numbers(actions: Sequence[Action], implied: bool) -> list[int]:
    """By place in the schedule's list, the place in the file's; an implied message has that of the action before it."""
    if not implied:
        return list(range(len(actions)))
    counts = accumulate(action.kind not in MESSAGES for action in actions)
    return [max(0, count - 1) for count in counts]
