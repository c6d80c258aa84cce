"""Groups of parameters: which rule updates them, and with what weight decay and what share of the rate.

An optimizer says so of each parameter (`OptimizerConfig.group`), and the `groups` of a job change it by patterns of
names, of which the first that matches wins:

    [[optimizer.groups]]
    match = "embedding.*"
    lr_factor = 0.1
    weight_decay = 0.0
"""

import math
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import msgspec

from fivefold.support.errors import Problem
from fivefold.support.plugin_calls import Wanted, value_text
from fivefold.support.text import did_you_mean


class ParamGroup(NamedTuple):
    """Parameters for which these are the same are updated together."""

    rule: Literal["element", "matrix"] = "element"  # `update`; or `accumulate`, `matrix_update` and `apply`
    weight_decay: float = 0.0
    lr_factor: float = 1.0  # of the step's learning rate


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `optimizer.groups` of a job. What it leaves out stays as the optimizer has it."""

    match: str  # of names, as `fivefold inspect RUN` lists them: * for any characters, ? for one
    lr_factor: float | None = None  # of the step's learning rate; 0: such parameters stay as they are
    weight_decay: float | None = None

    def problems(self, path: str) -> Iterator[Problem]:
        for name in ("lr_factor", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                sentence = f"{path}.{name}={value} must be a number, and not negative"
                yield Problem(f"optimizer.groups.{name}.range", sentence)
        if self.lr_factor is None and self.weight_decay is None:
            nothing = f"{path} says nothing of {self.match!r}; write lr_factor=... or weight_decay=..."
            yield Problem("optimizer.groups.empty", nothing)


def apply_settings(group: ParamGroup, settings: Sequence[GroupSettings], name: str) -> ParamGroup:
    """The group of the parameter of that name after a job's settings."""
    if (number := _first(settings, name)) < 0:
        return group
    own = settings[number]
    decay = group.weight_decay if own.weight_decay is None else own.weight_decay
    return ParamGroup(group.rule, decay, group.lr_factor if own.lr_factor is None else own.lr_factor)


def _first(settings: Sequence[GroupSettings], name: str) -> int:
    """The number of the first that matches; -1: none."""
    return next((number for number, one in enumerate(settings) if fnmatchcase(name, one.match)), -1)


def settings_problems(settings: Sequence[GroupSettings]) -> Iterator[Problem]:
    for number, one in enumerate(settings):
        yield from one.problems(f"optimizer.groups[{number}]")


def match_problems(settings: Sequence[GroupSettings], names: Sequence[str]) -> Iterator[Problem]:
    """Of groups that no parameter of the model is in."""
    first = [_first(settings, name) for name in names]
    for number, one in enumerate(settings):
        if number in first:
            continue
        path = f"optimizer.groups[{number}].match={one.match!r}"
        if earlier := sorted({first[at] for at, name in enumerate(names) if fnmatchcase(name, one.match)}):
            before = " and ".join(repr(settings[at].match) for at in earlier)
            late = f"{path} stands behind {before}, which has all that it matches, and the first match wins"
            yield Problem("optimizer.groups.order", f"{late}; write it before")
        else:
            hint = _nearest(one.match, names)
            yield Problem("optimizer.groups.match", f"{path} matches no parameter of the model; {hint}")


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """What a pattern may have meant, as a pattern for all layers."""
    known = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
    parts = [text for text in re.split(r"[*?]+", pattern) if text.strip(".")]
    has = [one for one in known if all(part in one for part in parts)] if parts else []
    return f"nearest: match={has[0]!r}" if has else did_you_mean(pattern, known)


def _odd(result: object) -> str:
    if not isinstance(result, ParamGroup):
        return value_text(result)
    numbers = (result.weight_decay, result.lr_factor)
    fit = all(isinstance(one, int | float) and 0 <= one < math.inf for one in numbers)
    return "" if fit and result.rule in ("element", "matrix") else repr(result)


_GROUP_DESCRIPTION = (
    'a fivefold.optim.groups:ParamGroup, of a rule ("element" or "matrix") and numbers that are not negative'
)
WANTED_GROUP = Wanted(_GROUP_DESCRIPTION, _odd)
