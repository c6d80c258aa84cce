"""How a text becomes a part of a shell script. Whatever a user has named goes through here, and nowhere else.

A word is quoted by `shlex`. Some characters are refused, although quotes would keep most of them: a word also stands in
comments, here-documents and lines that are typed, where a line that ends is no longer a part of what it was.
"""

import os
import re
import shlex
import textwrap
from collections.abc import Sequence

from fivefold.support.errors import UserError
from fivefold.support.formatting import printable

# Controls, what ends a line for some reader, and halves of characters, which stand for bytes that are no UTF-8.
_REFUSED = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONGEST = 24_000  # bytes of a command: ssh gets it quoted again, in one word, and Linux takes 128 KiB of these


def word(text: str, instead: str = "leave it out") -> str:
    if found := _REFUSED.search(text):
        raise UserError(f"{text!r} has the character {found[0]!r}, which no line of a script can hold; {instead}")
    return shlex.quote(text)


def command(program: Sequence[str], file: str = "", settings: Sequence[str] = (), options: Sequence[str] = ()) -> str:
    """A program's words, a file and KEY=VALUE, of which any text may come."""
    instead = "leave it out, or write the setting into the job file"
    words = [*map(word, program), *([word(_no_option(file))] if file else [])]
    text = " ".join([*words, *(word(one, instead) for one in settings), *map(word, options)])
    if (size := len(text.encode())) > _LONGEST:
        raise UserError(
            f"`{shlex.join(program)}` with its settings has {size} bytes, and {_LONGEST} at most are sure to reach "
            "every host; write the settings into the job file"
        )
    return text


def path(text: str) -> str:
    """With the home of whoever runs it; a ~ in quotes would be a directory of that name."""
    home, slash, rest = text.partition("/")
    if home == "~":
        return f'"$HOME"{slash}{word(rest) if rest else ""}'
    return word(_no_option(os.path.expanduser(text)))


def _no_option(name: str) -> str:
    """The same file by a name that no program takes for an option."""
    return f"./{name}" if name.startswith("-") else name


def comment(text: str, width: int = 100) -> list[str]:
    """As lines of a script or of YAML, for which more characters end a line than for Python or bash."""
    text = printable(re.sub(r"\s", " ", text))
    return textwrap.wrap(text, width, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
