"""What the settings of a plugin must be: a file holds them as a section of a job, and things are looked up by them."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from fivefold.support.plugin_calls import error_text


def class_shortcomings(kind: Any, base: Any, name: str) -> Iterator[str]:
    """What a description lacks that a job calls `name`, whatever its `base` is: its name, and that it is fixed."""
    if kind.__struct_config__.tag != name:
        yield f"has another name in jobs; write `class {kind.__name__}({base.__name__}, tag={name!r}, ...)`"
    if not kind.__struct_config__.frozen:
        yield "can be changed after it was checked; write `frozen=True` in its class line"
    if required := [field.name for field in msgspec.structs.fields(kind) if field.required]:
        yield f"has settings without a default: {', '.join(required)}"
    elif problem := _unwritable(kind, name):
        yield f"has settings that a job file cannot hold: {problem}"


def _unwritable(kind: type[msgspec.Struct], name: str) -> str:
    """What is wrong with settings that do not come back from a job file as they went; empty where nothing is."""
    try:
        own = kind()
    except (Exception, SystemExit) as error:
        return f"with its defaults it raises {error_text(error, name)}"
    try:
        back = msgspec.convert(msgspec.to_builtins(own), kind)
    except (msgspec.MsgspecError, TypeError) as error:
        return str(error)
    except (Exception, SystemExit) as error:
        return f"with its defaults it raises {error_text(error, name)}"
    return "" if back == own else f"{own} comes back as {back}"


def unhashable(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Of a description that is looked up by its settings: those that may be something that changes."""
    for field in msgspec.structs.fields(kind):
        if changes := _changes(field.type):
            yield f"has {field.name}: {changes}, which can be changed; write a tuple"


def _changes(kind: Any) -> str:
    """What in a type can be changed, and so is the key of no table; empty where nothing can."""
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if origin is Literal or kind is Ellipsis:
        return ""
    if origin in (Annotated, tuple, frozenset, Union, types.UnionType):
        return next(filter(None, map(_changes, inside[:1] if origin is Annotated else inside)), "")
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        if not origin.__struct_config__.frozen:
            return f"{origin.__name__} (without frozen=True)"
        return next(filter(None, (_changes(field.type) for field in msgspec.structs.fields(origin))), "")
    if origin in (Any, object) or getattr(origin, "__module__", "") == "collections.abc":
        return str(getattr(origin, "__name__", origin))
    return str(origin.__name__) if getattr(origin, "__hash__", True) is None else ""
