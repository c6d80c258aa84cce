"""Tables (TOML, JSON, KEY=VALUE) read into description objects, with every problem named at once.

msgspec converts and stops at the first misfit; this walks the fields itself, so that a job file with three mistakes
gets three sentences.
"""

import types
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_SPOKEN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a table",
    list: "a list",
    tuple: "a list",
}


def read(kind: type[T], value: Any, path: str, problems: list[str]) -> T | None:
    """`value` as a `kind`, or None and sentences added to `problems`; `path` is how the user wrote it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
        return _struct(kind, value, path, problems)
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        problems.append(_misfit(kind, value, path))
        return None


def _struct(kind: type[S], table: dict[str, Any], path: str, problems: list[str]) -> S | None:
    before = len(problems)
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    table = {key: value for key, value in table.items() if key != kind.__struct_config__.tag_field}
    problems += [unknown_key(path, key, list(known)) for key in table if key not in known]
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in table:
            optional, inner = _plain(field.type)
            if table[name] is None and optional:
                values[name] = None
            elif isinstance(inner, tuple):
                values[name] = _one_of(inner, table[name], join(path, name), problems)
            else:
                values[name] = read(inner, table[name], join(path, name), problems)
        elif field.required:
            problems.append(f"{join(path, name)} is missing: it has no default")
    return kind(**values) if len(problems) == before else None


def _one_of(kinds: tuple[type[msgspec.Struct], ...], value: Any, path: str, problems: list[str]) -> Any:
    """One of several kinds of table, told apart by their tag; without one it is the first."""
    if isinstance(value, kinds):
        return value
    tags = {str(kind.__struct_config__.tag): kind for kind in kinds}
    first, field = kinds[0], kinds[0].__struct_config__.tag_field
    tag = value.get(field, first.__struct_config__.tag) if isinstance(value, dict) else first.__struct_config__.tag
    if tag not in tags:
        problems.append(f"{path}.{field}={tag!r} is not a choice; {did_you_mean(str(tag), list(tags))}")
        return None
    return read(tags[tag], value, path, problems)


def unknown_key(path: str, key: str, known: list[str]) -> str:
    return f"{join(path, key)} is not a setting; {did_you_mean(key, known)}"


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _misfit(kind: Any, value: Any, path: str) -> str:
    """What was written, and what was wanted instead."""
    if get_origin(kind) is Literal:
        return f"{path}={value!r} is not a choice; {did_you_mean(str(value), [str(a) for a in get_args(kind)])}"
    wanted = _SPOKEN.get(get_origin(kind) or kind, "a table")
    inside = [_SPOKEN[item] for item in get_args(kind) if item in _SPOKEN]
    count = "" if Ellipsis in get_args(kind) or get_origin(kind) is not tuple else f"{len(get_args(kind))} "
    return f"{path}={value!r} is not {wanted}" + (f" of {count}{inside[0].removeprefix('a ')}s" if inside else "")


def _plain(kind: Any) -> tuple[bool, Any]:
    """Whether a type allows None, and the rest of it, without its range: a number outside of one is still a number.

    Where several kinds of table are allowed, the rest is all of them.
    """
    if get_origin(kind) in (types.UnionType, Union):
        first, *others = (option for option in get_args(kind) if option is not type(None))
        return True, (first, *others) if others else _plain(first)[1]
    return False, kind.__origin__ if get_origin(kind) is Annotated else kind


def numbers(text: str, option: str) -> list[float]:
    """The numbers of a list with commas."""
    try:
        return [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise UserError(f"{option} {text} is not a list of numbers; write for example {option} 1.5,2") from None
