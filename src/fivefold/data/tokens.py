"""Read prepared tokens: any window of a split, across shards, straight from the page cache."""

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fivefold.data.index import Index, Shard, read_index
from fivefold.data.progress import Report, quiet
from fivefold.support.errors import UserError
from fivefold.support.files import digest
from fivefold.support.formatting import did_you_mean

Scalar = TypeVar("Scalar", bound=np.generic)
Ids: TypeAlias = NDArray[np.unsignedinteger[Any]]

_SCAN = 1 << 22  # tokens, or bytes, looked at at a time


class Window(NamedTuple):
    """Consecutive tokens of a split."""

    tokens: NDArray[np.int64]
    loss: NDArray[np.bool_]  # whether a token, as a target, carries loss
    documents: NDArray[np.int64]  # the ordinal in the split of the document that each token belongs to


class TokenStore:
    """A directory that `prepare` wrote."""

    def __init__(self, path: Path, index: Index):
        self.path, self.index = path, index
        self.vocab = index.vocab
        self.dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(index.dtype).newbyteorder("<")
        self._splits = {name: Split(self, name, shards) for name, shards in index.splits.items()}

    @classmethod
    def open(cls, path: Path | str) -> "TokenStore":
        """Check that every file is there and has the size that the index promises."""
        store = cls(Path(path), read_index(Path(path)))
        problems = []
        for file in store.index.files():
            place = store.path / file.name
            size = place.stat().st_size if place.is_file() else None
            if size is None:
                problems.append(f"{place} is missing: the index promises {file.bytes} bytes")
            elif size != file.bytes:
                word = "short" if size < file.bytes else "too long"
                problems.append(f"{place} is {word}: {size} bytes, but the index promises {file.bytes}")
        for shard in (shard for shards in store.index.splits.values() for shard in shards):
            if shard.token_file.bytes != shard.tokens * store.dtype.itemsize:
                problems.append(
                    f"{store.path / shard.token_file.name} has {shard.token_file.bytes} bytes by the index, not "
                    f"{shard.tokens} tokens of {store.dtype.itemsize} bytes"
                )
        if problems:
            raise UserError(f"{problem}; prepare {path} again, or copy it again" for problem in problems)
        return store

    def split(self, name: str) -> "Split":
        """`train` or `valid`."""
        if name in self._splits:
            return self._splits[name]
        if name == "valid":
            raise UserError(
                f"{self.path} has no held-out documents: it was prepared with valid=0; prepare with e.g. valid=0.01"
            )
        raise UserError(f"{self.path} has no split {name!r}; {did_you_mean(name, list(self._splits))}")

    def check_ids(self, vocab: int, progress: Report = quiet) -> None:
        """Scan every token for an id that a vocabulary of this size does not have."""
        done, total = 0, sum(split.tokens for split in self._splits.values())
        for split in self._splits.values():
            for ids in split.scan(vocab):
                done += len(ids)
                progress(done, total)

    def verify(self, progress: Report = quiet) -> None:
        """Hash every file against the index, then scan the ids."""
        files = self.index.files()
        done, total = 0, sum(file.bytes for file in files)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        problems = []
        for file in files:
            found = digest(self.path / file.name, advance)
            if found != file.sha256:
                problems.append(
                    f"{self.path / file.name} is damaged: its sha256 is {found[:16]}..., "
                    f"but the index promises {file.sha256[:16]}..."
                )
        if problems:
            raise UserError(f"{problem}; prepare {self.path} again, or copy it again" for problem in problems)
        self.check_ids(self.vocab)


class Split:
    """The documents of one split as one long row of tokens."""

    def __init__(self, store: TokenStore, name: str, shards: list[Shard]):
        self.store, self.name = store, name
        self._shards = [_OpenShard(store, shard) for shard in shards]
        self._token_bounds = list(accumulate((shard.tokens for shard in shards), initial=0))
        self._document_bounds = list(accumulate((shard.documents for shard in shards), initial=0))
        self.tokens, self.documents = self._token_bounds[-1], self._document_bounds[-1]

    def read(self, start: int, stop: int, vocab: int | None = None) -> Window:
        """The tokens [start, stop); an id outside the vocabulary (the store's own if not given) is refused."""
        vocab = self.store.vocab if vocab is None else vocab
        tokens = np.empty(stop - start, np.int64)
        loss = np.ones(stop - start, bool)
        documents = np.empty(stop - start, np.int64)
        for place, begin, end, at in self._parts(start, stop):
            shard, here = self._shards[place], slice(at, at + end - begin)
            tokens[here] = shard.ids(begin, end, vocab)
            documents[here] = shard.document_of(begin, end) + self._document_bounds[place]
            if shard.loss is not None:
                loss[here] = shard.loss[begin:end]
        return Window(tokens, loss, documents)

    def ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens [start, stop) alone."""
        parts = [self._shards[p].ids(b, e, self.store.vocab) for p, b, e, _ in self._parts(start, stop)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def scan(self, vocab: int) -> Iterator[Ids]:
        """All tokens in order, in chunks, each checked against the vocabulary."""
        for shard in self._shards:
            for begin in range(0, shard.tokens, _SCAN):
                yield shard.ids(begin, min(begin + _SCAN, shard.tokens), vocab)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, begin and end inside it, place in the window) for each shard that a window touches."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"window [{start}, {stop}) of the {self.name} split, which has {self.tokens} tokens")
        place, at = bisect_right(self._token_bounds, start) - 1, start
        while at < stop:
            base = self._token_bounds[place]
            end = min(stop, self._token_bounds[place + 1])
            yield place, at - base, end - base, at - start
            place, at = place + 1, end


class _OpenShard:
    """Memory maps, made when first read: a rank that never comes to a shard never opens it."""

    def __init__(self, store: TokenStore, shard: Shard):
        self._store, self._shard = store, shard
        self.tokens = shard.tokens

    def ids(self, begin: int, end: int, vocab: int) -> Ids:
        """A view of the ids, checked. The maximum of a window costs far less than fetching it."""
        ids = self._ids[begin:end]
        if len(ids) and int(ids.max()) >= vocab:
            place = int(np.argmax(ids >= vocab))
            at = begin + place
            raise UserError(
                f"{self._store.path / self._shard.token_file.name}: token {at} (byte {at * ids.itemsize}) is id "
                f"{int(ids[place])}, but the vocabulary has {vocab} ids (0..{vocab - 1}); the file is damaged, or was "
                "prepared with another tokenizer"
            )
        return ids

    def document_of(self, begin: int, end: int) -> NDArray[np.int64]:
        """The ordinal in the shard of each token's document."""
        first, last = np.searchsorted(self._starts, (begin, end - 1), side="right")
        # Lengths of the documents inside the window, from the borders between them.
        borders = np.concatenate(([begin], self._starts[first:last], [end]))
        return np.repeat(np.arange(first - 1, last), np.diff(borders))

    @cached_property
    def loss(self) -> NDArray[np.bool_] | None:
        """The loss mask, or None when all tokens carry loss."""
        file = self._shard.loss_file
        return self._map(file.name, np.dtype(np.bool_), self.tokens) if file else None

    @cached_property
    def _ids(self) -> Ids:
        return self._map(self._shard.token_file.name, self._store.dtype, self.tokens)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        little = np.dtype(np.int64).newbyteorder("<")
        return self._map(self._shard.document_file.name, little, self._shard.documents)

    def _map(self, name: str, dtype: np.dtype[Scalar], count: int) -> NDArray[Scalar]:
        mapped = np.memmap(self._store.path / name, dtype, "r", shape=(count,))
        return mapped.view(np.ndarray)  # slices of a memmap are memmaps, and each costs microseconds more
