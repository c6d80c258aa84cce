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
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

from fivefold.schedules.actions import MESSAGE_KINDS, Action, tokens
from fivefold.schedules.check import check
from fivefold.schedules.communication import wire
from fivefold.schedules.reader import ReadSchedule, ScheduleReader
from fivefold.schedules.schedule import Schedule
from fivefold.support.errors import UserError
from fivefold.support.files import write
from fivefold.support.parsing import parse_json, parsing, read_bytes

FILE_SUFFIXES = (".txt", ".json")
TEXT_KEYS = ("schedule", "messages")  # the keys that have words for values; the others have numbers


def to_text(schedule: Schedule, *, implied: bool = False) -> str:
    """The text form; with `implied` it leaves out the messages, which must be where `wire` puts them."""
    if implied and with_derived_messages(schedule) != schedule:
        raise ValueError(f"the messages of schedule {schedule.name} do not follow from its compute order")
    return "\n".join(_lines(schedule, implied=implied)) + "\n"


def _lines(schedule: Schedule, *, implied: bool) -> Iterator[str]:
    for key, value in _header(schedule).items():
        yield f"{key} {' '.join(map(str, value)) if isinstance(value, list) else value}"
    if implied:
        yield "messages implied"
    for rank, actions in enumerate(schedule.ranks):
        yield f"rank {rank}"
        order = without_messages(actions) if implied else actions
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


def without_messages(order: tuple[Action, ...]) -> tuple[Action, ...]:
    """A rank's actions without its messages."""
    return tuple(action for action in order if action.kind not in MESSAGE_KINDS)


def with_derived_messages(schedule: Schedule) -> Schedule:
    """The schedule with the same compute orders, and the messages where `wire` puts them."""
    orders = map(without_messages, schedule.ranks)
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
        raise UserError(
            f"{source}: a schedule is an object with the key 'ranks', a list of lists of actions", "file.syntax"
        )
    reader = ScheduleReader(source)
    for key, value in data.items():
        if key in TEXT_KEYS and not isinstance(value, str):
            reader.refuse(key, f"{json.dumps(value)} should be a string")
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
        raise UserError(sentences, "schedule.proof")
    return reading.schedule


def _read(path: Path) -> ReadSchedule:
    with parsing(path, "a text file"):
        text = read_bytes(path, "JSON").decode()
    is_json = path.suffix.lower() == ".json" or text.lstrip().startswith(("{", "["))
    return read_json(text, str(path)) if is_json else read_text(text, str(path))
