"""Schedules on disk: `.json` for programs, anything else is the text form."""

from pathlib import Path

from fivefold.errors import UserError
from fivefold.schedule.check import MOST, check
from fivefold.schedule.reader import Reading
from fivefold.schedule.schedule import Schedule
from fivefold.schedule.text import read_json, read_text, to_json, to_text


def save(schedule: Schedule, path: Path) -> None:
    """Write a schedule; the suffix decides about the form."""
    path.write_text(to_json(schedule) if path.suffix == ".json" else to_text(schedule))


def load(path: Path) -> Schedule:
    """Read a schedule and prove it; every problem is named with its line."""
    reading = _read(path)
    problems = check(reading.schedule)
    if problems:
        sentences = []
        for problem in problems[:MOST]:
            place = reading.place(problem.rank, problem.place)
            sentences.append(f"{path}{f', {place}' if place else ''}: {problem}")
        if len(problems) > MOST:
            sentences.append(f"{path}: and {len(problems) - MOST} more problems")
        raise UserError(sentences)
    return reading.schedule


def _read(path: Path) -> Reading:
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file") from None
    return read_json(text, str(path)) if text.lstrip().startswith("{") else read_text(text, str(path))
