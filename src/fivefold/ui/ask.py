"""What a page asks: the words behind the ? of an address, read strictly, and the run directories it may look at.

ask = Ask({"model": "llama3-8b", "batch": "512"})
ask.text("model"), ask.whole("batch"), ask.whole("seq")     # "llama3-8b", 512, None
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean, either, whole_number


@dataclass(frozen=True)
class Ask:
    query: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[Path, ...] = ()  # directories that the user gave; nothing else may be read

    def only(self, *names: str) -> None:
        """Refuse words that nobody would read: a misspelled one must not be a silent default."""
        if strange := [name for name in self.query if name not in names]:
            raise UserError([f"{name!r} is not asked for here; {did_you_mean(name, names)}" for name in strange])

    def text(self, name: str, usual: str = "") -> str:
        """A word; `usual` where it is absent or empty."""
        return self.query.get(name, "").strip() or usual

    def whole(self, name: str) -> int | None:
        """A whole number; None where it is absent or empty."""
        if not (word := self.text(name)):
            return None
        if (number := whole_number(word)) is None:
            raise UserError(f"{name}={word[:40]!r} is not a whole number")
        return number

    def one_of(self, name: str, choices: tuple[str, ...], usual: str = "") -> str:
        """One of some words."""
        if (word := self.text(name, usual)) not in choices:
            raise UserError(f"{name}={word[:40]!r} is not {either([choice or 'nothing' for choice in choices])}")
        return word


_OPTION = re.compile(r"(`[^`]*`|'fivefold [^']*')|(?<![\w-])--([a-z][a-z-]*)")


def for_page(sentence: str) -> str:
    """A command's sentence in the page's words: "nearest: --batch 8" is "nearest: batch 8", since the page has fields
    for options. Commands to type, in quotes, stay what they are."""
    return _OPTION.sub(lambda found: found[1] or found[2].replace("-", " "), sentence)
