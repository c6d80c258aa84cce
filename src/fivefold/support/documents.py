"""Texts from outside: paths, files, TOML and JSON. Whatever is wrong with one is a `UserError` with its name.

Parsers raise more than errors of their own: RecursionError for brackets without an end, ValueError for a number of
5,000 digits, UnicodeDecodeError. `parsing` turns all of them into a sentence, also around other decoders.
"""

import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from fivefold.support.errors import UserError
from fivefold.support.files import read_regular

BROKEN = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)  # what a decoder raises of bad JSON
_LARGEST = {"TOML": 1 << 20, "JSON": 1 << 26}  # bytes
_DEEPEST = 64  # tables and lists inside each other
_DOTS = 1000  # of a line
_BITS = 64  # of a whole number; thousands of digits cannot even be printed
_NAME = 255  # bytes of a file's name, on every file system in use
_PATH = 4095  # bytes of a path that the system takes


class Missing(UserError):
    """There is no such file. Who knows which others there are says so instead."""


def path_of(text: str | Path) -> Path:
    """The path that a user means by a text, `~` included; one that no file can have is refused."""
    path = Path(text)
    try:
        path = path.expanduser()
    except RuntimeError:
        raise UserError(f"{str(text)!r} names the home of a user, {path.parts[0]}, who is not known here") from None
    if "\0" in str(path):
        raise UserError(f"{str(text)!r} is not a path: it has a character of code 0")
    names = [os.fsencode(part) for part in path.parts] if _encodes(path) else None
    if names is None:
        raise UserError(f"{str(text)!r} is not a path: the file system cannot write its characters")
    if max(map(len, names), default=0) > _NAME or len(os.fsencode(path)) > _PATH:
        raise UserError(f"the path {str(text)[:40]!r}... is too long: names have {_NAME} bytes at most, paths {_PATH}")
    return path


def _encodes(path: Path) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def parsing(source: str | Path, kind: str) -> Iterator[None]:
    """Around a parser: `source` is what it reads, `kind` what that should be ("TOML", "an index of tensors")."""
    try:
        yield
    except RecursionError:
        raise UserError(f"{source} cannot be read as {kind}: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{source} cannot be read as {kind}: byte {error.start} is not of a text in UTF-8") from None
    except ValueError as error:
        # Python's own advice about long numbers is for programmers.
        why = "a number in it has thousands of digits" if "integer string conversion" in str(error) else error
        raise UserError(f"{source} cannot be read as {kind}: {why}") from None


def read_bytes(path: Path, kind: str) -> bytes:
    """A whole file: no pipe or device, which may have no end, and not larger than any of its kind."""
    try:
        return read_regular(path_of(path), _LARGEST[kind], links=True)
    except OSError as error:
        problem = Missing if isinstance(error, FileNotFoundError) else UserError
        raise problem(f"cannot read {path}: {error.strerror or error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    with parsing(path, "TOML"):
        return parse_toml(read_bytes(path, "TOML").decode())


def read_json(path: Path) -> Any:
    with parsing(path, "JSON"):
        return parse_json(read_bytes(path, "JSON"))


def parse_toml(text: str) -> dict[str, Any]:
    """Raises what `parsing` speaks of."""
    text = text.replace("\r\n", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        if (dots := line.count(".")) > _DOTS:  # the parser's time grows with the square of a key's parts
            raise ValueError(f"line {number} has {dots:,} dots, and at most {_DOTS:,} are read")
    return _tame(tomllib.loads(text))


def toml_value(value: Any) -> str:
    """A scalar or a list of them, as TOML. JSON's is read the same but for one character, which TOML has escaped."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def parse_json(text: str | bytes) -> Any:
    """Raises what `parsing` speaks of."""
    return _tame(json.loads(text))


def _tame(found: Any) -> Any:
    """What was parsed, if all of it can be walked through and printed."""
    level = [found]
    for _ in range(_DEEPEST):
        if any(type(value) is int and value.bit_length() > _BITS for value in level):
            raise ValueError(f"a number in it has more than {_BITS} bits")
        inside = [value for value in level if isinstance(value, dict | list)]
        level = [one for value in inside for one in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return found
    raise ValueError(f"it is nested more than {_DEEPEST} deep")
