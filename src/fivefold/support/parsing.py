"""Reads texts from outside: paths, files, TOML and JSON. All that is wrong with one is a `UserError` with its name.

Parsers raise more than errors of their own: RecursionError for brackets without an end, ValueError for a number of
5,000 digits, UnicodeDecodeError. `parsing` turns all of them into a sentence, also around other decoders.
"""

import json
import os
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec

from fivefold.support.errors import Problem, UserError
from fivefold.support.files import read_regular
from fivefold.support.plugin_calls import raised_problem
from fivefold.support.ranges import misfits, outside
from fivefold.support.text import did_you_mean

PARSE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)  # what a decoder raises for bad JSON
_MAX_FILE_BYTES = {"TOML": 1 << 20, "JSON": 1 << 26}  # bytes of a file
_MAX_DEPTH = 64  # levels of tables and lists inside each other
_MAX_DOTS = 1000  # dots in a line
_MAX_INTEGER_BITS = 64  # bits of a whole number; Python does not print one of thousands of digits
_MAX_NAME_BYTES = 255  # bytes of a file's name, on every file system in use
_MAX_PATH_BYTES = 4095  # bytes of a path that the system takes
_MAX_NAMED_SETTINGS = 4  # settings of a table that a sentence names


class Missing(UserError):
    """There is no such file. Callers that know similar names raise an error with those instead."""


def path_of(text: str | Path) -> Path:
    """The path that a user means by a text, `~` included; one that no file can have is refused."""
    path = Path(text)
    if "\0" in str(path):
        raise UserError(f"{str(text)!r} is not a path: it has a character of code 0", "path.characters")
    try:
        path = path.expanduser()
    except (RuntimeError, UnicodeError):  # no such user; or a name that no user can have
        unknown = f"{str(text)!r} names the home of a user, {path.parts[0]}, who is not known here"
        raise UserError(unknown, "path.home") from None
    names = [os.fsencode(part) for part in path.parts] if _encodes(path) else None
    if names is None:
        raise UserError(f"{str(text)!r} is not a path: the file system cannot write its characters", "path.characters")
    if max(map(len, names), default=0) > _MAX_NAME_BYTES or len(os.fsencode(path)) > _MAX_PATH_BYTES:
        most = f"names have {_MAX_NAME_BYTES} bytes at most, paths {_MAX_PATH_BYTES}"
        raise UserError(f"the path {str(text)[:40]!r}... is too long: {most}", "path.length")
    return path


def _encodes(path: Path) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def parsing(source: str | Path, kind: str) -> Iterator[None]:
    """Turns the errors of a parser in the block into UserErrors. `source` is what it reads, `kind` what that should be
    ("TOML", "an index of tensors")."""
    try:
        yield
    except RecursionError:
        raise UserError(f"{source} cannot be read as {kind}: it is nested too deeply", "file.syntax") from None
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not of a text in UTF-8"
        raise UserError(f"{source} cannot be read as {kind}: {why}", "file.syntax") from None
    except ValueError as error:
        # Python's own message about long numbers is advice for programmers.
        why = "a number in it has thousands of digits" if "integer string conversion" in str(error) else str(error)
        raise UserError(f"{source} cannot be read as {kind}: {why}", "file.syntax") from None


def read_bytes(path: Path, kind: str) -> bytes:
    """The bytes of a file: a regular one, as a pipe or device may have no end, and not too large for its kind."""
    try:
        return read_regular(path_of(path), _MAX_FILE_BYTES[kind], links=True)
    except OSError as error:
        error_class = Missing if isinstance(error, FileNotFoundError) else UserError
        raise error_class(f"cannot read {path}: {error.strerror or error}", "file.read") from None


def read_toml(path: Path) -> dict[str, Any]:
    with parsing(path, "TOML"):
        return parse_toml(read_bytes(path, "TOML").decode())


def read_json(path: Path, numbers: Callable[[str], Any] = int) -> Any:
    """`numbers` reads whole ones: `float`, where some are too long and none matters."""
    with parsing(path, "JSON"):
        return parse_json(read_bytes(path, "JSON"), numbers)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raises errors that `parsing` turns into sentences."""
    text = text.replace("\r\n", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        if (dots := line.count(".")) > _MAX_DOTS:  # the parser's time grows with the square of a key's parts
            raise ValueError(f"line {number} has {dots:,} dots, and at most {_MAX_DOTS:,} are read")
    return _check_nesting(tomllib.loads(text))


def toml_value(value: Any) -> str:
    """A scalar, a list or an inline table, as TOML. JSON's scalars are read the same but for one character, which TOML
    has escaped."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        inside = (f"{key} = {toml_value(one)}" for key, one in value.items() if one is not None)
        return f"{{{', '.join(inside)}}}"
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def parse_json(text: str | bytes, numbers: Callable[[str], Any] = int) -> Any:
    """Parse JSON; raises errors that `parsing` turns into sentences."""
    return _check_nesting(json.loads(text, parse_int=numbers))


def _check_nesting(parsed: Any) -> Any:
    """The parsed value, if it is not nested too deeply and has no number that is too long to print."""
    level = [parsed]
    for _ in range(_MAX_DEPTH):
        if any(type(value) is int and value.bit_length() > _MAX_INTEGER_BITS for value in level):
            raise ValueError(f"a number in it has more than {_MAX_INTEGER_BITS} bits")
        inside = [value for value in level if isinstance(value, dict | list)]
        level = [item for value in inside for item in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return parsed
    raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")


# ---- reading --------------------------------------------------------------------------------------------------------
# Reads tables (TOML, JSON, KEY=VALUE) into description objects, and names every problem at once.
#
# msgspec stops at the first error; this walks through the fields itself, so that a job file with three mistakes gets
# three sentences.


T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a table",
    list: "a list",
    tuple: "a list",
}


def read(kind: type[T], value: Any, path: str, problems: list[str]) -> T | None:
    """Convert `value` to a `kind`; if it is none, return None and add to `problems`. `path` is its name for users."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
        return _struct(kind, value, path, problems)
    if (item := _item(kind)) is not None and isinstance(value, list | tuple):
        problems_before = len(problems)
        items = tuple(_read_item(item, one, f"{path}[{number}]", problems) for number, one in enumerate(value))
        return cast(T, items) if len(problems) == problems_before else None
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        problems.append(_misfit(kind, value, path))
        return None


def _item(kind: Any) -> type[msgspec.Struct] | None:
    """The kind of table that a list has, if it is a list of tables."""
    inside = get_args(kind) if get_origin(kind) is tuple else ()
    tables = inside[1:] == (Ellipsis,) and isinstance(inside[0], type) and issubclass(inside[0], msgspec.Struct)
    return inside[0] if tables else None


def _read_item(kind: type[S], value: Any, path: str, problems: list[str]) -> S | None:
    """One table of a list. It may say itself what is wrong with it, and the others are still read."""
    if isinstance(value, kind):
        return value
    try:
        return read(kind, value, path, problems)
    except UserError as error:
        problems += number_problems(error.coded, path)
        return None


def number_problems(problems: Iterable[str], path: str) -> list[str]:
    """What an item of a list says is wrong with it, which does not know its number: with the number in its settings."""
    own, said = f"{_without_index(path)}.", list[str]()
    for problem in problems:
        sentence = f"{path}.{problem.removeprefix(own)}" if problem.startswith(own) else problem
        said.append(Problem(problem.code, sentence) if isinstance(problem, Problem) else sentence)
    return said


def _struct(kind: type[S], table: dict[str, Any], path: str, problems: list[str]) -> S | None:
    problems_before = len(problems)
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
            missing = join(path, name)
            problems.append(Problem(f"{_without_index(missing)}.missing", f"{missing} is missing: it has no default"))
    if len(problems) == problems_before:
        return _make_struct(kind, values, problems)
    problems += misfits(kind, values, path).values()  # of a table that cannot be made, what else is wrong with it
    for name, value in values.items():
        if isinstance(value, msgspec.Struct):
            problems += outside(value, join(path, name)).values()
    return None


def _make_struct(kind: type[S], values: dict[str, Any], problems: list[str]) -> S | None:
    """The object of a table; a plugin's class may have code that runs when one is made."""
    name = kind.__struct_config__.tag
    if not isinstance(name, str) or ":" not in name:
        return kind(**values)
    try:
        return kind(**values)
    except UserError as error:
        problems += error.coded
    except (Exception, SystemExit) as error:
        problems.append(raised_problem(name, "__init__", error))
    return None


def _one_of(kinds: tuple[type[msgspec.Struct], ...], value: Any, path: str, problems: list[str]) -> Any:
    """Convert a table to one of several kinds, which its tag names; without a tag it is the first."""
    if isinstance(value, kinds):
        return value
    tags = {str(kind.__struct_config__.tag): kind for kind in kinds}
    first, field = kinds[0], kinds[0].__struct_config__.tag_field
    tag = value.get(field, first.__struct_config__.tag) if isinstance(value, dict) else first.__struct_config__.tag
    if tag not in tags:
        problems.append(_no_choice(f"{path}.{field}", tag, list(tags)))
        return None
    return read(tags[tag], value, path, problems)


def unknown_key(path: str, key: str, known: list[str]) -> Problem:
    return Problem("setting.unknown", f"{join(path, key)} is not a setting; {did_you_mean(key, known)}")


def _no_choice(path: str, value: Any, choices: list[str]) -> Problem:
    hint = did_you_mean(str(value), choices)
    return Problem(f"{_without_index(path)}.choice", f"{path}={value!r} is not a choice; {hint}")


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _misfit(kind: Any, value: Any, path: str) -> Problem:
    """The problem of a value that has another type than its field."""
    if get_origin(kind) is Literal:
        return _no_choice(path, value, [str(choice) for choice in get_args(kind)])
    if (item := _item(kind)) is not None:
        return Problem(f"{_without_index(path)}.type", f"{path}={value!r} is not a list of tables; {_settings(item)}")
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return Problem(f"{_without_index(path)}.type", f"{path}={value!r} is not a table; {_settings(kind)}")
    wanted = _TYPE_NAMES.get(get_origin(kind) or kind, "a table")
    inside = [_TYPE_NAMES[item] for item in get_args(kind) if item in _TYPE_NAMES]
    count = "" if Ellipsis in get_args(kind) or get_origin(kind) is not tuple else f"{len(get_args(kind))} "
    items = f" of {count}{inside[0].removeprefix('a ')}s" if inside else ""
    return Problem(f"{_without_index(path)}.type", f"{path}={value!r} is not {wanted}{items}")


def _settings(kind: type[msgspec.Struct]) -> str:
    """What to write into a table."""
    names = list(kind.__struct_fields__)
    more = ", ..." if len(names) > _MAX_NAMED_SETTINGS else ""
    return f"write a table with {', '.join(names[:_MAX_NAMED_SETTINGS])}{more}"


def _without_index(path: str) -> str:
    """A setting's name in codes, which is the same for all items of a list."""
    return re.sub(r"\[\d+\]", "", path)


def _plain(kind: Any) -> tuple[bool, Any]:
    """Whether a type allows None, and the type without None and without its range, which is checked elsewhere.

    If it allows several kinds of table, the type is the tuple of them.
    """
    if get_origin(kind) in (types.UnionType, Union):
        first, *others = (option for option in get_args(kind) if option is not type(None))
        return True, (first, *others) if others else _plain(first)[1]
    return False, kind.__origin__ if get_origin(kind) is Annotated else kind


def numbers(text: str, option: str) -> list[float]:
    """The numbers of a comma-separated list."""
    try:
        return [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        wanted = f"{option} {text} is not a list of numbers; write for example {option} 1.5,2"
        raise UserError(wanted, "option.numbers") from None
