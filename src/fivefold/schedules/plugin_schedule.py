"""Checks a plugin's schedule before layouts or the planner read it, and reports all problems of its record at once.

The record is tried with two small pipelines. A call that fails later, with other numbers, also raises a UserError.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from fivefold.schedules.check import prove
from fivefold.schedules.info import ScheduleInfo, ScheduleRequest
from fivefold.schedules.schedule import Placement, Schedule, peak_live
from fivefold.support.errors import Problem, UserError
from fivefold.support.plugin_calls import error_text, value_text

T = TypeVar("T")
_TYPE_NAMES = {str: "text", bool: "True or False", int: "a whole number", float: "a number", tuple: "a tuple"}
_INTEGER_OPTIONS = ("group", "memory")
_TRIED_RANKS = (2, 4)  # ranks; two microbatches for each, or as many as it needs


@lru_cache(maxsize=64)
def check_plugin_record(name: str, own: ScheduleInfo) -> ScheduleInfo:
    """The record of a plugin's schedule, under the name that jobs use. Each schedule that it builds is proven."""
    if lacks := [*_type_problems(own)]:
        raise UserError([_problem(f"{name} {lack}") for lack in lacks])
    if problems := [*_try_record(name, own)]:
        raise UserError(problems)
    return replace(
        own,
        name=name,
        place=lambda p, chunks: _check_placement(name, own, p, chunks),
        live=lambda p, m, v: _call_plugin(name, f"live for p={p}, m={m}", lambda: own.live(p, m, v)),
        build=lambda request: _build_schedule(name, own, request),
        schedule=None,
    )


def _problem(words: str) -> Problem:
    return Problem("plugin.schedule", words)


def _call_plugin(name: str, what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except UserError:  # what it refuses itself
        raise
    except (Exception, SystemExit) as error:
        raise UserError(_problem(f"{name}: {what} raised {error_text(error, name)}")) from None


# ---- the record -----------------------------------------------------------------------------------------------------


def _type_problems(own: ScheduleInfo) -> Iterator[str]:
    for field in fields(own):
        value = getattr(own, field.name)
        usual = field.default if isinstance(field.default, bool | int | float | str | tuple) else None
        if field.name in ("build", "place", "live"):
            if not callable(value):
                yield f"has {field.name}={value_text(value)}, which cannot be called"
        elif field.name == "name" or usual is not None:
            kind = str if field.name == "name" else type(usual)
            fits = isinstance(value, int | float) and value is not True if kind is float else type(value) is kind
            if not fits:
                yield f"has {field.name}={value_text(value)}, and not {_TYPE_NAMES[kind]}"
    if type(own.chunks) is int and own.chunks < 1:
        yield f"has chunks={own.chunks}; each rank has at least 1 stage"
    if type(own.least) is int and own.least < 0:
        yield f"has least={own.least}; the fewest microbatches are 0 or more times p"
    if isinstance(own.planned, tuple) and not all(type(chunks) is int and chunks > 0 for chunks in own.planned):
        yield f"has planned={value_text(own.planned)}, and not numbers of chunks, such as (1,)"
    if isinstance(own.options, tuple) and not {*own.options} <= {*_INTEGER_OPTIONS}:
        yield f"has options={value_text(own.options)}; known: {', '.join(_INTEGER_OPTIONS)}"


def _try_record(name: str, own: ScheduleInfo) -> Iterator[str]:
    """What fails with two small pipelines. The builder may refuse numbers with a UserError."""
    v = own.chunks
    for p in _TRIED_RANKS:
        request = ScheduleRequest(p, m := p * max(2, own.least), chunks=v)
        first: list[Callable[[], Any]] = [
            partial(_check_placement, name, own, p, v),
            partial(_check_live, name, own, p, m, v),
        ]
        problems = [problem for call in first for problem in _refusal(call)]
        yield from problems or (
            [] if _refuses_request(own, request) else _refusal(partial(_build_schedule, name, own, request))
        )


def _refusal(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except UserError as error:
        return error.coded
    return []


def _refuses_request(own: ScheduleInfo, request: ScheduleRequest) -> bool:
    try:
        own.build(request)
    except UserError:
        return True
    except (Exception, SystemExit):
        return False
    return False


def _check_placement(name: str, own: ScheduleInfo, p: int, chunks: int) -> Placement:
    what = f"place for p={p}, chunks={chunks}"
    made = _call_plugin(name, what, lambda: own.place(p, chunks))
    if not isinstance(made, Placement):
        raise UserError(_problem(f"{name}: {what} gave {value_text(made)}, and not a Placement"))
    if made.ranks != p:
        raise UserError(_problem(f"{name}: {what} puts stages on {made.ranks} ranks"))
    return made


def _check_live(name: str, own: ScheduleInfo, p: int, m: int, v: int) -> float:
    """The activations of a rank by the record, for numbers and, as the planner asks, for arrays."""
    what = f"live for p={p}, m={m}"
    live = _call_plugin(name, what, lambda: own.live(p, m, v))
    if isinstance(live, bool) or not isinstance(live, int | float | np.number) or not 0 <= live < math.inf:
        raise UserError(_problem(f"{name}: {what} gave {value_text(live)}, and not a number of activations"))
    of_arrays = _call_plugin(name, f"{what}, as arrays,", lambda: own.live(np.array([p, p]), np.array([m, m]), v))
    if np.shape(of_arrays) not in ((), (2,)) or not np.all(np.asarray(of_arrays) == live):
        gave = f"gave {value_text(live)}, and as arrays {value_text(of_arrays)}"
        raise UserError(_problem(f"{name}: {what} {gave}; write np.minimum for min"))
    return float(live)


# ---- what it builds -------------------------------------------------------------------------------------------------


def _build_schedule(name: str, own: ScheduleInfo, request: ScheduleRequest) -> Schedule:
    numbers = f"{name} for p={request.p}, m={request.m}"
    made = _call_plugin(name, f"build for p={request.p}, m={request.m}", lambda: own.build(request))
    live = _check_live(name, own, request.p, request.m, request.v)
    if problems := [_problem(f"{numbers} {lack}") for lack in _build_problems(name, own, request, made)]:
        raise UserError(problems)
    most = max(map(peak_live, made.ranks)) / request.v
    if most > min(live, request.m):
        says = f"holds {most:g} activations of a rank, and its `live` says {live:g}"
        raise UserError(_problem(f"{numbers} {says}: the planner would plan too little memory"))
    return prove(made)


def _build_problems(name: str, own: ScheduleInfo, request: ScheduleRequest, made: object) -> Iterator[str]:
    """How a schedule differs from what its record says."""
    if not isinstance(made, Schedule):
        yield f"builds a {type(made).__name__}, and not a Schedule"
        return
    if (made.p, made.m) != (request.p, request.m):
        yield f"builds a schedule for p={made.p}, m={made.m}"
    place = _check_placement(name, own, request.p, request.v)
    if made.placement != place:
        yield f"has its stages on ranks {list(made.placement.owner)}, and its `place` says {list(place.owner)}"
    if made.splits and not own.splits:
        yield "computes weight gradients apart (W); write splits=True in its ScheduleInfo"
    if any(action.joined for order in made.ranks for action in order) and not own.joins:
        yield "joins forward and backward passes (F&B); write joins=True in its ScheduleInfo"
