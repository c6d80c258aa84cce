"""Pieces: what the tokenizer gets of a document.

A document is one or more pieces: a prompt and its answer (which differ in loss), or the parts of a text too long to be
tokenized at once.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Characters, or bytes. A BPE encoder holds hundreds of bytes for each byte of its input, and a long text keeps one core
# busy while the others wait.
PIECE = 1 << 18


class Piece(NamedTuple):
    """Some text of a document."""

    text: str | bytes
    loss: bool
    ends: bool  # the document


class Problem(NamedTuple):
    """A place that cannot be read; in the stream, so that the reader can go on and find the others."""

    sentence: str


class Fields(NamedTuple):
    """Where a record keeps its text."""

    text: str = "text"
    prompt: str | None = None


def in_pieces(chunks: Iterable[str]) -> Iterator[str]:
    """The same text in pieces of at most PIECE characters, cut where a tokenizer would not notice if possible."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        begin = 0
        while len(rest) - begin > PIECE:
            end = _cut(rest, begin)
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest:
        yield rest


def _cut(text: str, begin: int) -> int:
    """Where to end the piece that starts at `begin`: after the last line end between two lines of text.

    The splitting patterns of GPT-2, GPT-4 and Llama 3 all break after a single line end with no space around it, so
    the ids are those of the whole text. Failing that, after any line end; failing that, anywhere.
    """
    limit = begin + PIECE
    last = at = text.rfind("\n", begin, limit)
    while at > limit - PIECE // 16:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
        at = text.rfind("\n", begin, at)
    return last + 1 if last > begin else limit
