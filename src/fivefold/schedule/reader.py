"""Reads the lines of a schedule file into a `Schedule`; what cannot be read is named with its line and the reason."""

from typing import NamedTuple

from fivefold.errors import UserError
from fivefold.schedule.actions import ALL, Action, parse_token
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import wire
from fivefold.words import did_you_mean

KEYS = ("schedule", "stages", "microbatches", "buffers", "peak", "slots", "messages")
MOST_BUFFERS = 1 << 20  # more than any schedule can use; a slip of the keyboard should not allocate them


class Reading(NamedTuple):
    """A schedule, and where in the file each rank and each of its actions stands ("line 12")."""

    schedule: Schedule
    rank_places: list[str]
    action_places: list[list[str]]  # empty lists when messages are implied: actions then have no line of their own

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
        if len(words) != 1 or not words[0].isdigit():
            self.problem(where, f"'rank {' '.join(words)}' should be 'rank' and one number; its actions go below it")
            self.rank = None
            return
        self.rank = int(words[0])
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
        owner = self.numbers("stages", least=0)
        (microbatches,) = self.numbers("microbatches", count=1) or (0,)
        (buffers,) = self.numbers("buffers", default=[2], count=1) or (2,)
        ranks = max(owner, default=-1) + 1
        if set(owner) != set(range(ranks)):
            self.problem(self.places["stages"], f"stages: each rank from 0 to {ranks - 1} must own at least one")
        peak = self.numbers("peak", default=[], count=ranks, least=0)
        slots = self.numbers("slots", default=[], count=1)
        implied = self.implied()
        self.all_ranks_listed(ranks)
        read = [self.order(rank, len(owner), microbatches) for rank in range(ranks)]
        if self.problems:
            raise UserError(self.problems)

        name = " ".join(self.values.get("schedule", ["unnamed"]))
        placement = Placement(tuple(owner))
        promise = Promise(tuple(peak) if peak else None, slots[0] if slots else None)
        orders = [[action for _, action in order] for order in read]
        if implied:
            schedule = wire(name, placement, microbatches, orders, buffers=buffers, promise=promise)
        else:
            schedule = Schedule(name, placement, microbatches, tuple(map(tuple, orders)), buffers, promise)
        action_places = [[] if implied else [where for where, _ in order] for order in read]
        return Reading(schedule, [self.rank_places[rank] for rank in range(ranks)], action_places)

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
        for word in words:
            if not word.isdigit() or not least <= int(word) <= MOST_BUFFERS:
                self.problem(where, f"{key}: {word!r} is not a whole number of {least} or more")
                return []
        return [int(word) for word in words]

    def implied(self) -> bool:
        words = self.values.get("messages")
        if words not in (None, ["implied"]):
            self.problem(self.places["messages"], "the only value of messages is 'implied'; without it, list them")
        return words is not None

    def all_ranks_listed(self, ranks: int) -> None:
        for rank in range(ranks):
            if rank not in self.tokens:
                self.problems.append(f"{self.source}: rank {rank} owns a stage, and there is no 'rank {rank}' line")
        for rank, where in self.rank_places.items():
            if rank >= ranks > 0:
                self.problem(where, f"rank {rank} owns no stage; the stages live on ranks 0 to {ranks - 1}")

    def order(self, rank: int, stages: int, microbatches: int) -> list[tuple[str, Action]]:
        read: list[tuple[str, Action]] = []
        for where, token in self.tokens.get(rank, []):
            try:
                actions = parse_token(token)
            except ValueError as error:
                self.problem(where, str(error))
                continue
            for action in actions:
                self.in_range(where, action, stages, microbatches)
                read.append((where, action))
        return read

    def in_range(self, where: str, action: Action, stages: int, microbatches: int) -> None:
        if stages and action.stage >= stages:
            self.problem(where, f"{action} is of stage {action.stage}, and stages go from 0 to {stages - 1}")
        if microbatches and action.microbatch != ALL and action.microbatch >= microbatches:
            self.problem(where, f"{action}: microbatches go from 0 to {microbatches - 1}")

    def problem(self, where: str, sentence: str) -> None:
        self.problems.append(f"{self.source}, {where}: {sentence}")
