"""Schedules on disk: `.json` for programs, anything else is the text form."""

from pathlib import Path

from fivefold.schedule.check import check
from fivefold.schedule.reader import Reading
from fivefold.schedule.schedule import Schedule
from fivefold.schedule.text import read_json, read_text, to_json, to_text
from fivefold.schedule.wording import shortened
from fivefold.support.errors import UserError

SUFFIXES = (".txt", ".json")


def save(schedule: Schedule, path: Path) -> None:
    """Write a schedule; the suffix decides about the form."""
    text = to_json(schedule) if path.suffix.lower() == ".json" else to_text(schedule)
    write(path, text.encode())


def write(path: Path, content: bytes) -> None:
    """Write a file, or say why it cannot be."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def load(path: Path) -> Schedule:
    """Read a schedule and prove it; every problem is named with its line."""
    reading = _read(path)
    problems = check(reading.schedule, reading.numbers)
    if problems:
        places = [reading.place(problem.rank, problem.place) for problem in problems]
        sentences = [
            f"{path}{f', {place}' if place else ''}: {problem}" for place, problem in zip(places, problems, strict=True)
        ]
        raise UserError(shortened(sentences, str(path)))
    return reading.schedule


def _read(path: Path) -> Reading:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file") from None
    is_json = path.suffix.lower() == ".json" or text.lstrip().startswith(("{", "["))
    return read_json(text, str(path)) if is_json else read_text(text, str(path))
