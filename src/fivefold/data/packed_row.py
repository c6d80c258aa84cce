"""The row of tokens of packed documents: which document lies where, found from their lengths alone.

    PackedRow(TokenStore.open("chats").split("train"), seq=4096, cut=True).read(0, 4097)

Documents are placed from the longest to the shortest, each into the window with the least room that it fits into (best
fit, decreasing); the windows then come in the order of a hash, for an evaluation reads the first ones. Every rank finds
the same arrangement by itself, of the documents' lengths and `seq`.

The first token of a document follows nothing of its own, and carries no loss: so the loss of a document is that which
it has alone.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.data.order import keyed, permute
from fivefold.data.rows import TokenRow, TokenWindow
from fivefold.data.tokens import Split, TokenStore
from fivefold.support.errors import UserError
from fivefold.support.text import plural

I64 = NDArray[np.int64]


def best_fit(lengths: Sequence[int], room: int) -> tuple[I64, I64]:
    """The window of each length, and where in it that begins. Lengths fall, and none is above `room`."""
    windows, places = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    with_room: dict[int, list[int]] = {}  # windows by what is left of them
    rooms: list[int] = []  # the keys, rising
    count = 0
    for number, length in enumerate(lengths):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            window, left, count = count, room, count + 1
        else:
            left = rooms[at]
            window = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[at]
        windows[number], places[number] = window, room - left
        if left > length:
            if left - length not in with_room:
                with_room[left - length] = []
                insort(rooms, left - length)
            with_room[left - length].append(window)
    return windows, places


class PackedRow(TokenRow):
    """Windows of `seq` tokens, one after another, and a last token as target."""

    def __init__(self, split: Split, seq: int, *, cut: bool):
        self.split, self.seq = split, seq
        self.vocab, self.stores = split.vocab, split.stores
        self.fill = split.store.index.end_of_document
        starts = split.document_starts()
        sizes = np.diff(starts, append=split.tokens)
        kept = sizes <= seq
        long = np.flatnonzero(~kept)
        silent = 0  # long ones whose first tokens have no loss
        if cut:
            for document, start in zip(long.tolist(), starts[long].tolist(), strict=True):
                kept[document] = split.loss_tokens(start + 1, start + seq) > 0
                silent += not kept[document]
        self.note = self._note(sizes, len(long), silent, cut=cut)
        if not kept.any():
            raise UserError(
                f"{split.store.path} has no document of {split.name} that data.seq={seq} can train on: "
                f"{len(sizes)} are longer; nearest: data.seq={int(sizes.min())}",
                "data.packed.none",
            )
        self._place(starts[kept], np.minimum(sizes[kept], seq))

    def _place(self, starts: I64, lengths: I64) -> None:
        falling = np.argsort(-lengths, kind="stable")
        windows, places = best_fit(lengths[falling].tolist(), self.seq)
        count = int(windows.max()) + 1
        numbers = np.arange(count)
        begins = permute(numbers, count, keyed(0, np.zeros_like(numbers)))[windows] * self.seq + places
        order = np.argsort(begins)
        self.begins, taken = begins[order], falling[order]
        self.origins, self.lengths = starts[taken], lengths[taken]  # in the split
        self.tokens, self.documents = count * self.seq + 1, len(begins)

    def _note(self, sizes: I64, long: int, silent: int, *, cut: bool) -> str:
        if not long:
            return ""
        whole = plural(len(sizes), "document")
        said = f"{long} of the {whole} of {self.split.name} are longer than data.seq={self.seq}, up to {sizes.max()}"
        if not cut:
            return f"{said} tokens, and are left out (data.long=drop)"
        left_out = f", and {silent} of them left out, as their first {self.seq} carry no loss" if silent else ""
        return f"{said} tokens: they are cut to their first {self.seq}{left_out} (data.long=drop leaves out all)"

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, start: int, stop: int) -> TokenWindow:
        at = np.arange(start, stop)
        document = np.searchsorted(self.begins, at, side="right") - 1
        filled = at - self.begins[document] >= self.lengths[document]
        tokens, loss = np.full(stop - start, self.fill, np.int64), np.zeros(stop - start, bool)
        for begin, first, last in self._parts(start, stop):
            here = slice(begin - start, begin - start + last - first)
            tokens[here], loss[here], _ = self.split.read(first, last)
        loss[at == self.begins[document]] = False
        return TokenWindow(tokens, loss, 2 * document + filled)  # what fills a window is a document of its own

    def loss_tokens(self, start: int, stop: int) -> int:
        count = 0
        for begin, first, last in self._parts(start, stop):
            fresh = int(self.begins[np.searchsorted(self.begins, begin, side="right") - 1] == begin)
            count += self.split.loss_tokens(first + fresh, last)
        return count

    def touch(self, start: int, stop: int) -> None:
        for _, first, last in self._parts(start, stop):
            self.split.touch(first, last)

    def tokens_in(self, store: TokenStore, name: str, begin: int, end: int) -> list[tuple[int, int]]:
        found = []
        for first, last in self.split.tokens_in(store, name, begin, end):
            hit = (self.origins < last) & (self.origins + self.lengths > first)
            low = self.begins + np.maximum(first - self.origins, 0)
            high = self.begins + np.minimum(last - self.origins, self.lengths)
            found += [*zip(low[hit].tolist(), high[hit].tolist(), strict=True)]
        return found

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Of each document within [start, stop): where that begins in the row, and its tokens in the split."""
        low = max(0, int(np.searchsorted(self.begins, start, side="right")) - 1)
        high = int(np.searchsorted(self.begins, stop))
        for begin, origin, length in zip(
            self.begins[low:high].tolist(),
            self.origins[low:high].tolist(),
            self.lengths[low:high].tolist(),
            strict=True,
        ):
            first, last = max(begin, start), min(begin + length, stop)
            if first < last:
                yield first, origin + first - begin, origin + last - begin
