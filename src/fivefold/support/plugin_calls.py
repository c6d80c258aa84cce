"""What is asked of a plugin. Where it fails, one sentence names it, its member, what came, and the line in its file.

    operations = ask(kind, "operations", spec, tp, wanted=OPERATIONS)

Members of ours are called as they are. What is raised where no member is asked (in the forward pass of a block's
module, in a thread that reads) is known by the frames that it has left in a plugin's files: `plugins.blamed`.
"""

import math
import reprlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.support.errors import Problem, TrainingError, UserError
from fivefold.support.plugin_files import source_files


@dataclass(frozen=True)
class Wanted:
    """What a member is to return."""

    words: str
    odd: Callable[[Any], str]  # what is odd about a result; empty where nothing is


def instance(words: str, *kinds: type) -> Wanted:
    return Wanted(words, lambda result: "" if isinstance(result, kinds) else value_text(result))


def each(words: str, odd: Callable[[Any], str]) -> Wanted:
    """A list, a tuple or an iterator; `odd` says what is wrong with one of its items."""

    def odd_one(result: Any) -> str:
        if not isinstance(result, list | tuple):
            return value_text(result)
        return next(filter(None, map(odd, result)), "")

    return Wanted(words, odd_one)


WANTED_TEXTS = each("sentences, in a list or by yield", lambda one: "" if isinstance(one, str) else value_text(one))
WHOLE_NUMBERS = each("a list of whole numbers", lambda one: "" if type(one) is int else value_text(one))
WANTED_AMOUNT = Wanted(
    "a number, finite and not negative",
    lambda result: "" if isinstance(result, int | float) and 0 <= result < math.inf else value_text(result),
)
WANTED_BOOL = instance("True or False", bool)


def ask(plugin: Any, member: str, *given: Any, wanted: Wanted | None = None, **options: Any) -> Any:
    """What a method returns, or a property is: of a plugin what is `wanted`, with iterators as lists, or UserError."""
    name = str(plugin.__struct_config__.tag)
    method = callable(getattr(type(plugin), member))
    if ":" not in name:  # of the table
        return getattr(plugin, member)(*given, **options) if method else getattr(plugin, member)
    try:
        result = getattr(plugin, member)(*given, **options) if method else getattr(plugin, member)
        if isinstance(result, Iterator):
            result = [*result]
    except (UserError, TrainingError):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(raised_problem(name, member, error)) from error
    if odd := wanted.odd(result) if wanted else "":
        raise wrong(plugin, member, f"gave {odd}, and not {wanted.words if wanted else ''}")
    return result


def problems_of(plugin: Any, *given: Any) -> list[str]:
    """What its own `problems` says is wrong; or, where that fails, what is wrong with it."""
    try:
        return [*ask(plugin, "problems", *given, wanted=WANTED_TEXTS)]
    except UserError as error:
        return error.coded


def wrong(plugin: Any, member: str, what: str) -> UserError:
    """The error about what a member of a plugin has done."""
    return UserError(Problem("plugin.result", f"{plugin.__struct_config__.tag}: {member} {what}"))


def value_text(value: Any) -> str:
    """A value in a sentence; of what is large or foreign its type."""
    if value is None or isinstance(value, bool | int | float | str | list | tuple | dict):
        return reprlib.repr(value)
    if not isinstance(getattr(value, "shape", None), tuple):
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__} of shape {list(value.shape)} and {getattr(value, 'dtype', 'no dtype')}"


def raised_problem(name: str, member: str, error: BaseException) -> Problem:
    return Problem("plugin.raised", f"{name}: {member} raised {error_text(error, name)}")


def error_text(error: BaseException, name: str) -> str:
    """An error, and the last place that it has come through in a plugin's files."""
    place = place_of(error, name)
    return f"{type(error).__name__}: {error}" + (f" ({place.file}, line {place.line})" if place else "")


class PluginFrame(NamedTuple):
    depth: int
    file: str
    line: int | None
    member: str  # the function


def place_of(error: BaseException, name: str) -> PluginFrame | None:
    """The last frame of an error in one of a plugin's files. Our own are not looked for: none of them is a plugin's."""
    module = name.partition(":")[0]
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return None
    own = {path.absolute() for _, path in source_files(module)}
    frames = [*enumerate(traceback.extract_tb(error.__traceback__))]
    places = (PluginFrame(depth, frame.filename, frame.lineno, frame.name) for depth, frame in reversed(frames))
    return next((place for place in places if Path(place.file).absolute() in own), None)
