"""A data source before a run: what it opens has what is needed, is pure in the position, and counts what it gives."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fivefold.data.base import DataSource
from fivefold.data.rows import Splits, TokenRow, TokenWindow, read_window
from fivefold.support.errors import Problem, UserError


def check(source: DataSource, before_reading: Callable[[Splits], None] = lambda splits: None) -> Splits:
    """Returns what a source opens, or raises all that it lacks. `before_reading` sees it before a token is read."""
    name = f"data.source={source.source}"
    splits, again = _open_source(source, name), _open_source(source, name)
    if lacks := [*_lacks(splits)]:
        raise UserError(Problem("data.source.opened", f"{name} opened {lack}") for lack in lacks)
    if splits.fingerprint != again.fingerprint or [*splits.rows] != [*again.rows]:
        odd = f"has another fingerprint when it is opened again: {splits.fingerprint}, then {again.fingerprint}"
        raise UserError(Problem("data.source.pure", f"{name} {odd}"))
    before_reading(splits)
    for split, row in splits.rows.items():
        if impure := next(_impure(row, again.rows[split], source.seq), ""):
            raise UserError(Problem("data.source.pure", f"{name} is not pure in the position: {split} {impure}"))
        if miscounted := next(_miscounted(row, source.seq), ""):
            raise UserError(Problem("data.source.count", f"{name} miscounts {split}: {miscounted}"))
    for store in splits.stores:
        store.files.touched.clear()  # no step has read them
    return splits


def _open_source(source: DataSource, name: str) -> Splits:
    try:
        return source.open()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
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
    for start, stop in _windows(row, seq):
        cut = start + (stop - start) // 3 + 1
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


def _miscounted(row: TokenRow, seq: int) -> Iterator[str]:
    """Where `loss_tokens` counts other targets than `read` gives: of a sample's targets, as a step asks, of all tokens
    of a window, and of one token on either side of where masks change, where a count that is off by one shows."""
    for start, stop in _windows(row, seq):
        loss = read_window(row, start, stop).loss
        ranges = [(start + 1, stop), (start, stop)]
        if len(changes := np.flatnonzero(loss[1:] != loss[:-1])):
            at = start + int(changes[0])
            ranges += [(at, at + 1), (at + 1, at + 2)]
        for first, last in ranges:
            counted = row.loss_tokens(first, last)
            given = int(np.count_nonzero(loss[first - start : last - start]))
            if not isinstance(counted, int | np.integer) or counted != given:
                yield f"loss_tokens({first}, {last}) gave {counted!r}, and read gives {given} tokens with loss there"


def _windows(row: TokenRow, seq: int) -> list[tuple[int, int]]:
    """The first window of the row, one in its middle, and the last."""
    length = min(seq + 1, row.tokens)
    return [(start, start + length) for start in sorted({0, (row.tokens - length) // 2, row.tokens - length})]
