"""YAML with comments, written from plain data.

A key that begins with # is a comment: {"#": "why", "replicas": 2} becomes a line "# why" and a line "replicas: 2". Of
YAML's many ways to write a text, three are used: bare where no reader could take it for something else, JSON's quotes,
and a block for several lines. The first and the last hold plain ASCII alone. JSON's quotes are YAML's double quotes, in
which a backslash can write every character, so that none has to stand there that a reader refuses or takes for the end
of a line. A character beyond 16 bits is two escapes in JSON and one in YAML, whose readers do not join two.
"""

import json
import re
from typing import Any

from fivefold.deploy.shell import comment

_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_BLOCK = re.compile(r"[!-~][ -~]*\n(?:[ -~]+\n|\n(?=[ -~]))*")  # whole lines of plain characters, none empty at the end
_WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}  # which some readers take for values


def documents(*values: dict[str, Any]) -> str:
    return "---\n".join("\n".join(_lines(value)) + "\n" for value in values)


def plain(value: Any) -> Any:
    """The data without its comments: what a reader gets."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if not key.startswith("#")}
    return [plain(one) for one in value] if isinstance(value, list) else value


def _lines(value: dict[str, Any]) -> list[str]:
    lines = []
    for key, one in value.items():
        if key.startswith("#"):
            lines += comment(one)
        elif isinstance(one, dict) and one:
            lines += [f"{key}:", *_indented(_lines(one))]
        elif isinstance(one, list) and one:
            lines += [f"{key}:", *(line for item in one for line in _item(item))]
        elif isinstance(one, str) and _BLOCK.fullmatch(one):
            lines += [f"{key}: |", *_indented(one.splitlines())]
        else:
            lines.append(f"{key}: {_scalar(one)}")
    return lines


def _item(item: Any) -> list[str]:
    if isinstance(item, str) and _BLOCK.fullmatch(item):
        return ["- |", *_indented(item.splitlines())]
    if not isinstance(item, dict) or not item:
        return [f"- {_scalar(item)}"]
    lines = _lines(item)
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [*lines[:first], f"- {lines[first]}", *_indented(lines[first + 1 :])]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _BARE.fullmatch(value) and value.lower() not in _WORDS:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)
