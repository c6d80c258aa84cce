"""What a data source opens: rows of tokens, which are pure in the position.

A row has so many tokens, and what stands at a position is the same whenever, wherever and in whatever pieces it is
read: ranks read their samples without a word to each other, and a run goes on at any sample. `check` holds a source
against that before a run starts, and `read_window` every window against its shape and the vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.support.errors import Problem, UserError

if TYPE_CHECKING:
    from fivefold.data.base import DataSource
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

    @property
    def rows(self) -> dict[str, TokenRow]:
        return {"train": self.train} | ({"valid": self.valid} if self.valid is not None else {})

    @property
    def stores(self) -> "list[TokenStore]":
        """The directories of prepared tokens that are read."""
        return [*dict.fromkeys(store for row in self.rows.values() for store in row.stores)]


def read_window(row: TokenRow, start: int, stop: int, vocab: int | None = None) -> TokenWindow:
    """The tokens [start, stop), or why they are none; `vocab`: the model's."""
    who = type(row).__name__
    try:
        window = row.read(start, stop)
    except UserError:
        raise
    except Exception as error:
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


# ---- check ----------------------------------------------------------------------------------------------------------
# A source before a run: what it opens has what is needed, and is pure in the position.


def check(source: "DataSource", before_reading: Callable[[Splits], None] = lambda splits: None) -> Splits:
    """Returns what a source opens, or raises all that it lacks. `before_reading` sees it before a token is read."""
    name = f"data.source={source.source}"
    splits, again = _opened(source, name), _opened(source, name)
    if lacks := [*_lacks(splits)]:
        raise UserError(Problem("data.source.opened", f"{name} opened {lack}") for lack in lacks)
    if splits.fingerprint != again.fingerprint or [*splits.rows] != [*again.rows]:
        odd = f"has another fingerprint when it is opened again: {splits.fingerprint}, then {again.fingerprint}"
        raise UserError(Problem("data.source.pure", f"{name} {odd}"))
    before_reading(splits)
    for split, row in splits.rows.items():
        if impure := next(_impure(row, again.rows[split], source.seq), ""):
            raise UserError(Problem("data.source.pure", f"{name} is not pure in the position: {split} {impure}"))
    for store in splits.stores:
        store.files.touched.clear()  # no step has read them
    return splits


def _opened(source: "DataSource", name: str) -> Splits:
    try:
        return source.open()
    except UserError:
        raise
    except Exception as error:
        raised = f"{name}: open() raised {type(error).__name__}: {error}"
        raise UserError(Problem("data.source.open", raised)) from error


def _lacks(splits: Any) -> Iterator[str]:
    if not isinstance(splits, Splits):
        yield f"a {type(splits).__name__}, and not fivefold.data.rows:Splits"
        return
    if not isinstance(splits.fingerprint, str) or not splits.fingerprint:
        yield f"fingerprint={splits.fingerprint!r}, and not a text that other tokens would change"
    for split, row in splits.rows.items():
        if not isinstance(row, TokenRow):
            yield f"{split} as a {type(row).__name__}, and not a fivefold.data.rows:TokenRow"
            continue
        for name in ("tokens", "vocab"):
            if type(value := getattr(row, name, None)) is not int or value < 1:
                yield f"{split} with {name}={value!r}, and not a number of {'tokens' if name == 'tokens' else 'ids'}"
        if type(row).read is TokenRow.read:
            yield f"{split} as a {type(row).__name__}, which has no method read(self, start, stop)"


def _impure(row: TokenRow, again: TokenRow, seq: int) -> Iterator[str]:
    """Where two readings differ: of the same window, of one cut in two, by another that was opened."""
    length = min(seq + 1, row.tokens)
    for start in sorted({0, (row.tokens - length) // 2, row.tokens - length}):
        stop, cut = start + length, start + length // 3 + 1
        whole = read_window(row, start, stop)
        readings = {
            "read a second time": read_window(row, start, stop),
            "read by another process": read_window(again, start, stop),
        }
        if cut < stop:
            parts = read_window(again, start, cut), read_window(again, cut, stop)
            joined = TokenWindow(*(np.concatenate(pair) for pair in zip(*parts, strict=True)))
            readings[f"read in two pieces, cut at {cut}"] = joined
        for how, window in readings.items():
            for name, before, now in zip(window._fields, whole, window, strict=True):
                if not np.array_equal(before, now):
                    at = start + int(np.argmax(before != now))
                    yield f"has other {name} at {at} if [{start}, {stop}) is {how}"
