"""Quotes texts for a shell, and writes YAML with comments.

In a table, a key that begins with # is a comment: {"#": "why", "replicas": 2} becomes a line "# why" and a line
"replicas: 2". Of YAML's many ways to write a text, three are used: bare if no reader could take it for another value,
JSON's quotes, and a block for several lines. Bare texts and blocks are plain ASCII. JSON's quotes are YAML's double
quotes, in which every character can be escaped, so that no reader refuses one or takes it for the end of a line. A
character beyond 16 bits is two escapes in JSON and one in YAML, whose readers do not join two.
"""

import json
import os
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.support.errors import UserError
from fivefold.support.text import printable

# ---- shell ----------------------------------------------------------------------------------------------------------
# Quotes texts for shell scripts. All texts that come from a user go through here.
#
# A word is quoted by `shlex`. Some characters are refused, although quotes would keep most of them: a word is also
# written into comments, here-documents and lines to type, where the end of a line would end them.


# Control characters, those that end a line for some reader, and surrogates, which stand for bytes that are not UTF-8.
_FORBIDDEN = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MAX_COMMAND_BYTES = 24_000  # ssh gets it quoted once more, as one word, of which Linux takes 128 KiB


def quote(text: str, instead: str = "leave it out") -> str:
    """A text as one word of a shell."""
    if match := _FORBIDDEN.search(text):
        refused = f"{text!r} has the character {match[0]!r}, which no line of a script can hold"
        raise UserError(f"{refused}; {instead}", "launch.characters")
    return shlex.quote(text)


def quote_command(
    program: Sequence[str], file: str = "", settings: Sequence[str] = (), options: Sequence[str] = ()
) -> str:
    """A command line: a program's words, a file, KEY=VALUE settings and options, each quoted."""
    instead = "leave it out, or write the setting into the job file"
    words = [*map(quote, program), *([quote(_no_option(file))] if file else [])]
    text = " ".join([*words, *(quote(setting, instead) for setting in settings), *map(quote, options)])
    if (size := len(text.encode())) > _MAX_COMMAND_BYTES:
        raise UserError(
            f"`{shlex.join(program)}` with its settings has {size} bytes; at most {_MAX_COMMAND_BYTES} are sure to "
            "reach every host; write the settings into the job file",
            "launch.command.length",
        )
    return text


def quote_path(text: str) -> str:
    """A path as a word of a shell; ~ becomes $HOME, as quotes would make it a directory of that name."""
    home, slash, rest = text.partition("/")
    if home == "~":
        return f'"$HOME"{slash}{quote(rest) if rest else ""}'
    return quote(_no_option(os.path.expanduser(text)))


def _no_option(name: str) -> str:
    """The same file by a name that no program takes for an option."""
    return f"./{name}" if name.startswith("-") else name


def comment_lines(text: str, width: int = 100) -> list[str]:
    """A text as comment lines of a script or of YAML, in which more characters end a line than in Python or bash."""
    text = printable(re.sub(r"\s", " ", text))
    return textwrap.wrap(text, width, initial_indent="# ", subsequent_indent="# ", break_long_words=False)


def fill_template(template: str, parts: Mapping[str, object]) -> str:
    """A template with each @NAME@ replaced by its part, which is not searched for more. A list is whole lines."""

    def part_of(match: re.Match[str]) -> str:
        part = parts[match[1]]
        return "".join(f"{line}\n" for line in part) if isinstance(part, list) else f"{part}{match[2]}"

    return re.sub(r"@([A-Z_]+)@(\n?)", part_of, template)


# ---- yaml -----------------------------------------------------------------------------------------------------------


_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_BLOCK = re.compile(r"[!-~][ -~]*\n(?:[ -~]+\n|\n(?=[ -~]))*")  # whole lines of plain characters, none empty at the end
_WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}  # that some readers take for other values


def yaml_documents(*values: dict[str, Any]) -> str:
    """Tables as the documents of a YAML file."""
    return "---\n".join("\n".join(_lines(value)) + "\n" for value in values)


def without_comments(value: Any) -> Any:
    """The data without its comments, as a reader of the YAML gets it."""
    if isinstance(value, dict):
        return {key: without_comments(inner) for key, inner in value.items() if not key.startswith("#")}
    return [without_comments(item) for item in value] if isinstance(value, list) else value


def _lines(value: dict[str, Any]) -> list[str]:
    lines = []
    for key, inner in value.items():
        if key.startswith("#"):
            lines += comment_lines(inner)
        elif isinstance(inner, dict) and inner:
            lines += [f"{key}:", *_indent(_lines(inner))]
        elif isinstance(inner, list) and inner:
            lines += [f"{key}:", *(line for item in inner for line in _item(item))]
        elif isinstance(inner, str) and _BLOCK.fullmatch(inner):
            lines += [f"{key}: |", *_indent(inner.splitlines())]
        else:
            lines.append(f"{key}: {_scalar(inner)}")
    return lines


def _item(item: Any) -> list[str]:
    if isinstance(item, str) and _BLOCK.fullmatch(item):
        return ["- |", *_indent(item.splitlines())]
    if not isinstance(item, dict) or not item:
        return [f"- {_scalar(item)}"]
    lines = _lines(item)
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [*lines[:first], f"- {lines[first]}", *_indent(lines[first + 1 :])]


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _BARE.fullmatch(value) and value.lower() not in _WORDS:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)
