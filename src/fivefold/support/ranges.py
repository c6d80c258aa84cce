"""Ranges of numbers. They stand with the fields they belong to, and a number is held against its range before its use.

    layers: Annotated[int, within(1, 100_000)]
    outside(spec, "model")                         # {"layers": "model.layers=2000000 is more than 100000"}
    checked("seq", 10**12, within(1, TOKENS))      # the same of an argument, raised

The upper ends are far beyond what anybody builds, and near enough that what loops over a number comes to its end.
"""

from functools import cache
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta

from fivefold.support.errors import Problem, UserError

RANKS = 10_000_000
STEPS = 10**12  # of training, and all that is counted in them
SEQUENCES = 10**9  # of a step
TOKENS = 10**9  # of a sequence
SECONDS = 10**8  # three years; the system's clocks overflow somewhere beyond


def within(least: float, most: float, hint: str = "") -> Meta:
    """At least so much, at most so much; `hint` says what else there is for one who wants less."""
    return Meta(ge=least, le=most, description=hint or None)


def outside(description: msgspec.Struct, path: str) -> dict[str, str]:
    """Of every number of a description that is not in the range of its field, a sentence."""
    ranges = _ranges(type(description)).items()
    misfits = {field: misfit(f"{path}.{field}", getattr(description, field), allowed) for field, allowed in ranges}
    return {field: Problem(f"{path}.{field}.range", sentence) for field, sentence in misfits.items() if sentence}


def checked(name: str, value: Any, allowed: Meta) -> Any:
    """An argument that is a whole number in its range; None, which is one that was not given, stays None."""
    if value is not None and type(value) is not int:
        raise UserError(f"{name}={value!r} is not a whole number", "option.type")
    if sentence := misfit(name, value, allowed):
        raise UserError(sentence, "option.range")
    return value


def seconds(name: str, value: float) -> float:
    """An argument that says how long something may take."""
    if sentence := misfit(name, value, within(0.001, SECONDS)):
        raise UserError(sentence, "option.range")
    return value


def misfit(name: str, value: Any, allowed: Meta) -> str | None:
    """What is wrong with a number, if anything is; nan is in no range."""
    least, most = allowed.ge or 0, allowed.le or 0
    if value is not None and type(value) not in (int, float):
        return f"{name}={value!r} is not a number"
    if value is None or least <= value <= most:
        return None
    # Python does not print a number of thousands of digits.
    shown = f"2^{value.bit_length() - 1} or so" if isinstance(value, int) and value.bit_length() > 64 else value
    hint = f"; {allowed.description}" if allowed.description else ""
    return f"{name}={shown} is more than {most}" if value > most else f"{name}={shown} must be at least {least}{hint}"


@cache
def _ranges(kind: type[msgspec.Struct]) -> dict[str, Meta]:
    ranges = {}
    for field in msgspec.structs.fields(kind):
        for option in get_args(field.type) if get_origin(field.type) is not Annotated else (field.type,):
            if get_origin(option) is Annotated:
                ranges[field.name] = option.__metadata__[0]
    return ranges
