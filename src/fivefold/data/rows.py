"""What a data source opens: rows of tokens, which are pure in the position.

A row has so many tokens, and what stands at a position is the same whenever, wherever and in whatever pieces it is
read: ranks read their samples without a word to each other, and a run goes on at any sample. `source_check.py` holds a
source against that before a run starts, and `read_window` every window against its shape and the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.support.errors import Problem, UserError

if TYPE_CHECKING:
    from fivefold.data.tokens import TokenStore


class TokenWindow(NamedTuple):
    """Consecutive tokens of a row."""

    tokens: NDArray[np.int64]
    loss: NDArray[np.bool_]  # whether a token, as a target, carries loss
    documents: NDArray[np.int64]  # the number of each token's document: another one where another document begins


class TokenRow:
    """A source's class of rows sets `tokens` and `vocab`, and has `read`. The others are for what is faster or more."""

    tokens: int  # how many there are
    vocab: int  # every token is below it
    documents: int | None = None  # how many, where that is known
    stores: "tuple[TokenStore, ...]" = ()  # prepared tokens that it reads: their files are hashed against their index

    def read(self, start: int, stop: int) -> TokenWindow:
        """The tokens [start, stop)."""
        raise NotImplementedError

    def ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens [start, stop) alone."""
        return self.read(start, stop).tokens

    def loss_tokens(self, start: int, stop: int) -> int:
        """How many of the tokens [start, stop) carry loss, as targets: each rank asks it of all ranks' samples."""
        return int(np.count_nonzero(read_window(self, start, stop).loss))

    def touch(self, start: int, stop: int) -> None:
        """Count the tokens [start, stop) as read, so that the files which have them are hashed."""
        if self.stores:
            self.read(start, stop)

    def tokens_in(self, store: "TokenStore", name: str, begin: int, end: int) -> list[tuple[int, int]]:
        """Which tokens [first, last) depend on some bytes of a store's file, where that is known: a damage is then
        said to be of certain steps."""
        return []


@dataclass(frozen=True)
class Splits:
    """The data of a run."""

    train: TokenRow
    valid: TokenRow | None  # documents kept apart for evaluations, if any
    fingerprint: str  # of all tokens: a run goes on with no others
    where: str = ""  # they come from, for who reads it
    notes: tuple[str, ...] = ()  # what of the data is not trained on: a run says it before its first step

    @property
    def rows(self) -> dict[str, TokenRow]:
        return {"train": self.train} | ({"valid": self.valid} if self.valid is not None else {})

    @property
    def stores(self) -> "list[TokenStore]":
        """The directories of prepared tokens that are read."""
        return [*dict.fromkeys(store for row in self.rows.values() for store in row.stores)]


def read_window(row: TokenRow, start: int, stop: int, vocab: int | None = None) -> TokenWindow:
    """The tokens [start, stop), or why they are none; `vocab`: the model's."""
    who = f"{type(row).__module__}:{type(row).__name__}"
    try:
        window = row.read(start, stop)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raised = f"{who}.read({start}, {stop}) raised {type(error).__name__}: {error}"
        raise UserError(Problem("data.source.read", raised)) from error
    if lacks := [*_misshapen(window, stop - start)]:
        raise UserError(Problem("data.source.window", f"{who}.read({start}, {stop}) {lack}") for lack in lacks)
    tokens, size = window.tokens, min(row.vocab, vocab or row.vocab)
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < size):
        place = int(np.argmax((tokens < 0) | (tokens >= size)))
        odd = f"{who} has the token {int(tokens[place])} at {start + place}, and ids are 0 to {size - 1}"
        raise UserError(Problem("data.ids", odd))
    return window


def _misshapen(window: Any, length: int) -> Iterator[str]:
    if not isinstance(window, TokenWindow):
        yield f"returned a {type(window).__name__}, and not a TokenWindow"
        return
    for name, array, kind in zip(window._fields, window, (np.integer, np.bool_, np.integer), strict=True):
        wanted = f"an array of {length} {'booleans' if kind is np.bool_ else 'integers'}"
        if not isinstance(array, np.ndarray):
            yield f"returned {name} as a {type(array).__name__}, and not {wanted}"
        elif array.shape != (length,) or not np.issubdtype(array.dtype, kind):
            shape = " x ".join(map(str, array.shape)) or "no"
            yield f"returned {name} as {shape} values of {array.dtype}, and not {wanted}"
