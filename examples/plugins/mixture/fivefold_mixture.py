"""Two directories of prepared tokens, mixed by shares.

The row of the mixture is made of blocks of `data.seq` tokens. Every block continues one of the two directories; block
number b is the second's if `share` of the first b + 1 blocks is a larger whole number than that of the first b. So each
stretch of the row has the shares to within a block, and which tokens a block has is arithmetic: nothing is drawn,
counted or stored. A pass is over when both directories have been read; until then the shorter one begins anew.

A block's first token follows no text of its own, and carries no loss where the block before is the other directory's.
"""

import hashlib
from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fivefold.data.base import DataSource
from fivefold.data.rows import Splits, TokenRow, TokenWindow
from fivefold.data.shards import TokenShards
from fivefold.support.errors import Problem, UserError

if TYPE_CHECKING:
    from fivefold.data.tokens import TokenStore


class Mixture(DataSource, frozen=True, kw_only=True, tag="fivefold_mixture:Mixture"):
    first_path: str = ""  # directories made by `fivefold data prepare`, with the same tokenizer
    second_path: str = ""
    share: float = 0.5  # of the blocks: those of the second

    def problems(self) -> Iterator[Problem]:
        if not 0 < self.share < 1:
            yield Problem("mixture.share", f"data.share={self.share} is the second's share: above 0, and below 1")
        for name in ("first_path", "second_path"):
            if not getattr(self, name):
                yield Problem("mixture.path", f"data.{name} is missing: a directory that `fivefold data prepare` made")

    def prepared(self) -> tuple[Path, ...]:
        return tuple(path for part in self.parts() if part.path for path in part.prepared())

    def parts(self) -> list[TokenShards]:
        return [TokenShards(path=self.first_path), TokenShards(path=self.second_path)]

    def open(self) -> Splits:
        if problems := [*self.problems()]:
            raise UserError(problems)
        first, second = (part.open() for part in self.parts())
        ends = {(store.index.tokenizer_file, store.index.end_of_document) for store in first.stores + second.stores}
        if len(ends) > 1:
            raise UserError(Problem("mixture.tokenizer", f"{self} were prepared with different tokenizers"))
        share = Fraction(self.share).limit_denominator(10**6)
        text = f"{first.fingerprint} {second.fingerprint} {share} {self.seq}"
        valid = None
        if first.valid is not None and second.valid is not None:
            valid = Blocks(first.valid, second.valid, share, self.seq)
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
        return Splits(Blocks(first.train, second.train, share, self.seq), valid, fingerprint, str(self))


class Blocks(TokenRow):
    """Blocks of two rows, in turns."""

    def __init__(self, first: TokenRow, second: TokenRow, share: Fraction, size: int):
        self.rows, self.share, self.size = (first, second), share, size
        self.counts = [row.tokens // size for row in self.rows]  # whole blocks
        if not all(self.counts):
            raise UserError(Problem("mixture.short", f"one of the two has fewer than the {size} tokens of data.seq"))
        blocks = max(ceil(count / part) for count, part in zip(self.counts, (1 - share, share), strict=True))
        self.tokens, self.vocab = blocks * size, max(row.vocab for row in self.rows)
        self.stores = (*first.stores, *second.stores)

    def read(self, start: int, stop: int) -> TokenWindow:
        windows = []
        for which, begin, end, fresh in self.pieces(start, stop):
            window = self.rows[which].read(begin, end)
            if fresh:
                window.loss[0] = False
            windows.append(window._replace(documents=2 * window.documents + which))
        return TokenWindow(*(np.concatenate(arrays) for arrays in zip(*windows, strict=True)))

    def loss_tokens(self, start: int, stop: int) -> int:
        """Of masks alone: the other ranks' tokens are not read."""
        count = 0
        for which, begin, end, fresh in self.pieces(start, stop):
            count += self.rows[which].loss_tokens(begin + fresh, end)
        return count

    def touch(self, start: int, stop: int) -> None:
        for which, begin, end, _ in self.pieces(start, stop):
            self.rows[which].touch(begin, end)

    def tokens_in(self, store: "TokenStore", name: str, begin: int, end: int) -> list[tuple[int, int]]:
        """Of the first time that the damaged part is read."""
        found = []
        for which, row in enumerate(self.rows):
            for first, last in row.tokens_in(store, name, begin, end):
                numbers = range(first // self.size, min(-(-last // self.size), self.counts[which]))
                found += [(place * self.size, (place + 1) * self.size) for place in self.places(which, numbers)]
        return found

    def places(self, which: int, numbers: range) -> Iterator[int]:
        """The blocks that the blocks of one row are."""
        share = self.share if which else 1 - self.share
        for number in numbers:
            place = max(0, int((number - 1) / share))
            while self.block(place) != (which, number):
                place += 1
            yield place

    def block(self, number: int) -> tuple[int, int]:
        """Which row a block is of, and which of its blocks it is, passes counted on."""
        before, after = int(number * self.share), int((number + 1) * self.share)
        return (1, before) if after > before else (0, number - before)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, bool]]:
        """The row, and its tokens [begin, end), of each block in a window; and whether a block of the other ends."""
        for number in range(start // self.size, -(-stop // self.size)):
            which, block = self.block(number)
            first = (block % self.counts[which] - number) * self.size  # of the row, where the mixture has 0
            begin, end = max(start, number * self.size), min(stop, (number + 1) * self.size)
            fresh = begin == number * self.size and number > 0 and self.block(number - 1)[0] != which
            yield which, first + begin, first + end, fresh
