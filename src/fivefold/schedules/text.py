"""A schedule as text that people read, edit and diff, and as JSON; in memory and on disk. Both round-trip.

    schedule 1f1b
    stages 0 1              # stage 0 lives on rank 0, stage 1 on rank 1
    microbatches 2
    buffers 2
    peak 2 1                # optional promise: live stage activations per rank
    slots 9                 # optional promise: makespan when F, I and W take one slot each
    rank 0
      F0.0 SEND_A0.0 F0.1 SEND_A0.1 RECV_G0.0 B0.0 RECV_G0.1 B0.1
    rank 1
      RECV_A1.0 RECV_A1.1 F1.0 B1.0 SEND_G1.0 F1.1 B1.1 SEND_G1.1

With the line `messages implied` the lists hold no SEND and no RECV: `wire` puts them where no rank can wait in a
circle, and `buffers` is the least number of them.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from fivefold.schedules.actions import ALL, MESSAGES, Action, parse_token, tokens
from fivefold.schedules.build import wire
from fivefold.schedules.check import check
from fivefold.schedules.schedule import Bounds, Placement, Schedule, name_problem
from fivefold.support.errors import UserError
from fivefold.support.files import write
from fivefold.support.parsing import parse_json, parsing, read_bytes
from fivefold.support.text import did_you_mean, whole_number

# ---- reader ---------------------------------------------------------------------------------------------------------
# Reads the lines of a schedule file into a `Schedule`; what cannot be read is named with its line and the reason.


KEYS = ("schedule", "stages", "microbatches", "buffers", "peak", "slots", "messages")


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

    def finish(self) -> ReadSchedule:
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
        read = [self.order(rank, len(owner), microbatches, implied) for rank in range(ranks)]  # [(where, action), ...]
        listed = sum(map(len, read))
        if not self.problems and microbatches > listed:
            where = self.places["microbatches"]
            self.problem(where, f"there cannot be {microbatches} microbatches, with {listed} actions in total")
        if self.problems:
            raise UserError(self.problems)

        promise = Bounds(tuple(peak) if peak else None, slots[0] if slots else None)
        orders = tuple(tuple(action for _, action in order) for order in read)
        schedule = Schedule(name, Placement(tuple(owner)), microbatches, orders, buffers, promise)
        if implied:
            schedule = wire(name, schedule.placement, microbatches, orders, buffers=buffers, promise=promise)
        numbers = [_numbers(actions, implied) for actions in schedule.ranks]
        rank_places = [self.rank_places[rank] for rank in range(ranks)]
        action_places = [
            [order[n][0] if order else where for n in in_file]  # where the rank lists nothing, its own line
            for order, where, in_file in zip(read, rank_places, numbers, strict=True)
        ]
        return ReadSchedule(schedule, rank_places, action_places, numbers)

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
        """A rank's actions, each with where it was read; every problem with them is noted."""
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
    """For each action of the schedule its number in the file; an implied message has that of the action before it."""
    if not implied:
        return list(range(len(actions)))
    counts = accumulate(action.kind not in MESSAGES for action in actions)
    return [max(0, count - 1) for count in counts]


# ---- text -----------------------------------------------------------------------------------------------------------


SUFFIXES = (".txt", ".json")
WORDS = ("schedule", "messages")  # the keys that have words for values; the others have numbers


def to_text(schedule: Schedule, *, implied: bool = False) -> str:
    """The text form; with `implied` it leaves out the messages, which must be where `wire` puts them."""
    if implied and rewired(schedule) != schedule:
        raise ValueError(f"the messages of schedule {schedule.name} do not follow from its compute order")
    return "\n".join(_lines(schedule, implied)) + "\n"


def _lines(schedule: Schedule, implied: bool) -> Iterator[str]:
    for key, value in _header(schedule).items():
        yield f"{key} {' '.join(map(str, value)) if isinstance(value, list) else value}"
    if implied:
        yield "messages implied"
    for rank, actions in enumerate(schedule.ranks):
        yield f"rank {rank}"
        order = unwired(actions) if implied else actions
        yield from wrap(" ".join(tokens(order)), 100, initial_indent="  ", subsequent_indent="  ")


def _header(schedule: Schedule) -> dict[str, Any]:
    header: dict[str, Any] = {
        "schedule": schedule.name,
        "stages": list(schedule.placement.owner),
        "microbatches": schedule.microbatches,
        "buffers": schedule.buffers,
    }
    if schedule.promise.peak is not None:
        header["peak"] = list(schedule.promise.peak)
    if schedule.promise.slots is not None:
        header["slots"] = schedule.promise.slots
    return header


def unwired(order: tuple[Action, ...]) -> tuple[Action, ...]:
    """A rank's actions without its messages."""
    return tuple(action for action in order if action.kind not in MESSAGES)


def rewired(schedule: Schedule) -> Schedule:
    """The schedule with the same compute orders, and the messages where `wire` puts them."""
    orders = map(unwired, schedule.ranks)
    name, placement, m = schedule.name, schedule.placement, schedule.microbatches
    return wire(name, placement, m, orders, buffers=schedule.buffers, promise=schedule.promise)


def to_json(schedule: Schedule) -> str:
    """The same as JSON, one rank a line."""
    head = json.dumps(_header(schedule))
    ranks = ",\n  ".join(json.dumps(tokens(actions)) for actions in schedule.ranks)
    return f'{head[:-1]}, "ranks": [\n  {ranks}\n]}}\n'


def read_text(text: str, source: str = "schedule") -> ReadSchedule:
    """Read the text form, and note where everything stands. Names every line that cannot be read, with the reason."""
    reader = ScheduleReader(source)
    for number, line in enumerate(text.splitlines(), start=1):
        reader.line(f"line {number}", line.partition("#")[0].split())
    return reader.finish()


def read_json(text: str, source: str = "schedule") -> ReadSchedule:
    """Read the JSON form, and note where everything stands."""
    with parsing(source, "JSON"):
        data = parse_json(text)
    ranks = data.pop("ranks", None) if isinstance(data, dict) else None
    if not isinstance(ranks, list) or not all(isinstance(actions, list) for actions in ranks):
        raise UserError(f"{source}: a schedule is an object with the key 'ranks', a list of lists of actions")
    reader = ScheduleReader(source)
    for key, value in data.items():
        if key in WORDS and not isinstance(value, str):
            reader.problem(key, f"{json.dumps(value)} should be a string")
            continue
        reader.header(key, key, [_word(item) for item in (value if isinstance(value, list) else [value])])
    for rank, actions in enumerate(ranks):
        reader.begin_rank(f"ranks[{rank}]", [str(rank)])
        for place, action in enumerate(actions):
            reader.actions(f"ranks[{rank}][{place}]", [_word(action)])
    return reader.finish()


def _word(value: object) -> str:
    """A value as the text form writes it. A value that no schedule has is left as JSON, for the reader to refuse."""
    return value if isinstance(value, str) else json.dumps(value)


# ---- on disk: `.json` for programs, anything else is the text form ---------------------------------------------------


def save(schedule: Schedule, path: Path) -> None:
    """Write a schedule; the suffix decides about the form."""
    text = to_json(schedule) if path.suffix.lower() == ".json" else to_text(schedule)
    write(path, text)


def load(path: Path) -> Schedule:
    """Read a schedule and prove it; every problem is named with its line."""
    reading = _read(path)
    problems = check(reading.schedule, reading.numbers)
    if problems:
        places = [reading.place(problem.rank, problem.place) for problem in problems]
        located = [f"{path}, {place}" if place else str(path) for place in places]
        sentences = [f"{where}: {problem}" for where, problem in zip(located, problems, strict=True)]
        raise UserError(sentences)
    return reading.schedule


def _read(path: Path) -> ReadSchedule:
    with parsing(path, "a text file"):
        text = read_bytes(path, "JSON").decode()
    is_json = path.suffix.lower() == ".json" or text.lstrip().startswith(("{", "["))
    return read_json(text, str(path)) if is_json else read_text(text, str(path))
