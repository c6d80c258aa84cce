"""Ranges of numbers, which are written in the types of fields, and checked before a number is used.

    layers: Annotated[int, within(1, 100_000)]
    outside(spec, "model")                         # {"layers": "model.layers=2000000 is more than 100000"}
    check_range("seq", 10**12, within(1, MAX_TOKENS))    # the same for an argument, raised

The upper ends are far beyond any real use, and low enough that loops over a number end in reasonable time.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta

from fivefold.support.errors import Problem, UserError

MAX_RANKS = 10_000_000
MAX_STEPS = 10**12  # of training, and all settings that are counted in steps
SEQUENCES = 10**9  # of a step
MAX_TOKENS = 10**9  # of a sequence
MAX_SECONDS = 10**8  # three years; the system's clocks overflow somewhere beyond


def within(least: float, most: float, hint: str = "") -> Meta:
    """A range; `hint` ends the sentence about a smaller number, and says what to use instead."""
    return Meta(ge=least, le=most, description=hint or None)


def outside(description: msgspec.Struct, path: str) -> dict[str, str]:
    """Returns {field: sentence} for every number of a description that is not in the range of its field."""
    return misfits(type(description), msgspec.structs.asdict(description), path)


def misfits(kind: type[msgspec.Struct], values: Mapping[str, Any], path: str) -> dict[str, str]:
    """The same for those values of a description that there are."""
    ranges = {field: range_ for field, range_ in _ranges(kind).items() if field in values}
    sentences = {field: misfit(f"{path}.{field}", values[field], range_) for field, range_ in ranges.items()}
    return {field: Problem(f"{path}.{field}.range", sentence) for field, sentence in sentences.items() if sentence}


def check_range(name: str, value: Any, range_: Meta) -> Any:
    """Returns an argument if it is a whole number in its range, or None, which is one that was not given."""
    if value is not None and type(value) is not int:
        raise UserError(f"{name}={value!r} is not a whole number", "option.type")
    if sentence := misfit(name, value, range_):
        raise UserError(sentence, "option.range")
    return value


def seconds(name: str, value: float) -> float:
    """Returns an argument if it is a valid number of seconds."""
    if sentence := misfit(name, value, within(0.001, MAX_SECONDS)):
        raise UserError(sentence, "option.range")
    return value


def misfit(name: str, value: Any, range_: Meta) -> str | None:
    """A sentence about a number that is not in its range, None if it is; nan is in no range."""
    least, most = range_.ge or 0, range_.le or 0
    if value is not None and type(value) not in (int, float):
        return f"{name}={value!r} is not a number"
    if value is None or least <= value <= most:
        return None
    # Python does not print a number of thousands of digits.
    shown = f"2^{value.bit_length() - 1} or so" if isinstance(value, int) and value.bit_length() > 64 else value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        shown = int(value)  # 0, not 0.0
    hint = f"; {range_.description}" if range_.description else ""
    return f"{name}={shown} is more than {most}" if value > most else f"{name}={shown} must be at least {least}{hint}"


@cache
def _ranges(kind: type[msgspec.Struct]) -> dict[str, Meta]:
    """The ranges of a description's fields that have one."""
    ranges = {}
    for field in msgspec.structs.fields(kind):
        for option in get_args(field.type) if get_origin(field.type) is not Annotated else (field.type,):
            if get_origin(option) is Annotated:
                ranges[field.name] = option.__metadata__[0]
    return ranges
