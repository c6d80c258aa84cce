"""Read prepared tokens: any window of a split, across shards."""

import hashlib
import os
import resource
import threading
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fivefold.data.index import CHUNK_BYTES, INDEX_FILE, REMEDY, DataFile, DataIndex, DataShard, read_index
from fivefold.data.rows import Splits, TokenRow, TokenWindow
from fivefold.support.errors import Problem, UserError
from fivefold.support.files import Regular, open_regular
from fivefold.support.progress import Report, quiet
from fivefold.support.text import did_you_mean

# ---- files ----------------------------------------------------------------------------------------------------------
# Read the files of prepared tokens, and notice when they change.
#
# Not by memory maps: a file that is cut off while it is mapped ends the process with SIGBUS, a read of it ends in a
# sentence. A window costs the same either way, some microseconds and its copy.


class FileStat(NamedTuple):
    """What a file was like when it was first opened."""

    inode: int
    bytes: int
    modified: int


class OpenFiles:
    """The files of a directory, the most recently read of them open. Threads may share it."""

    def __init__(self, path: Path):
        self.path = path
        self.touched: dict[str, bytearray] = {}  # for each file, and each chunk of it, whether it was ever read
        self._open: dict[str, Regular] = {}  # the most recent one last
        self._seen: dict[str, FileStat] = {}
        self._lock = threading.Lock()
        # A quarter of what the process may open; large sets have more files than that.
        self._most = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))

    def read(self, file: DataFile, begin: int, out: NDArray[Any]) -> None:
        """Fill `out` with what the file has from byte `begin` on."""
        if not out.size:
            return
        view, done = out.view(np.uint8).data, 0
        try:
            stream = self._stream(file)
            while done < len(view):
                count = os.preadv(stream.fileno(), [view[done:]], begin + done)
                if not count:
                    break
                done += count
            now = _stat(stream)
        except OSError as error:
            raise UserError(
                f"{self.path / file.name} cannot be read at byte {begin + done}: {error.strerror}", "file.read"
            ) from None
        self._compare(file, now)
        self.touch(file, begin, begin + len(view))

    def touch(self, file: DataFile, begin: int, end: int) -> None:
        """Count bytes as read."""
        touched = self.touched.get(file.name)
        if touched is None:
            touched = self.touched.setdefault(file.name, bytearray(-(-file.bytes // CHUNK_BYTES)))
        for chunk in range(begin // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1):
            touched[chunk] = True

    def _stream(self, file: DataFile) -> Regular:
        with self._lock:
            stream = self._open.pop(file.name, None)
            if stream is None:
                stream = open_regular(self.path / file.name, links=True)
                self._seen.setdefault(file.name, _stat(stream))
            self._open[file.name] = stream
            if len(self._open) > self._most:
                del self._open[next(iter(self._open))]  # a thread that reads it still holds it
            return stream

    def _compare(self, file: DataFile, now: FileStat) -> None:
        """After every read: what was read is from before any change that is found later."""
        if now.bytes < file.bytes:
            raise UserError(
                f"{self.path / file.name} was cut off while it was read: it ends at byte {now.bytes}, and the index "
                f"promises {file.bytes} bytes; copy it again",
                "data.file.cut",
            )
        if now != self._seen[file.name]:
            raise UserError(
                f"{self.path / file.name} was replaced or changed while it was read; tokens that are in use must stay "
                "as they are: prepare into another directory",
                "data.file.changed",
            )


def _stat(stream: Regular) -> FileStat:
    status = os.fstat(stream.fileno())
    return FileStat(status.st_ino, status.st_size, status.st_mtime_ns)


# ---- tokens ---------------------------------------------------------------------------------------------------------


Ids: TypeAlias = NDArray[np.unsignedinteger[Any]]

_SCAN_SIZE = 1 << 22  # tokens, or bytes, looked at at a time
_REMEMBERED_EVERY = 2048  # one of so many documents is remembered: 4 kB for a million


class TokenStore:
    """A directory that `prepare` wrote."""

    def __init__(self, path: Path, index: DataIndex):
        self.path, self.index, self.files = path, index, OpenFiles(path)
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
            try:
                size = place.stat().st_size if place.is_file() else None
            except OSError as error:
                problems.append(Problem("file.read", f"{place} cannot be read: {error.strerror}; {REMEDY}"))
                continue
            if size is None:
                absent = f"{place} is missing: the index promises {file.bytes} bytes"
                problems.append(Problem("data.file.missing", f"{absent}; {REMEDY}"))
            elif size != file.bytes:
                length = f"{'short' if size < file.bytes else 'too long'}: {size} bytes"
                promised = f"{place} is {length}, but the index promises {file.bytes}"
                problems.append(Problem("data.file.size", f"{promised}; {REMEDY}"))
        if problems:
            raise UserError(problems)
        return store

    def split(self, name: str) -> "Split":
        """`train` or `valid`."""
        if name in self._splits:
            return self._splits[name]
        if name == "valid":
            raise UserError(
                f"{self.path} has no held-out documents: it was prepared with valid=0; prepare with e.g. valid=0.01",
                "data.split.valid",
            )
        known = did_you_mean(name, list(self._splits))
        raise UserError(f"{self.path} has no split {name!r}; {known}", "data.split.unknown")

    def splits(self) -> Splits:
        """All of it, as a data source opens it. The index has the sha256 of every file."""
        fingerprint = hashlib.sha256((self.path / INDEX_FILE).read_bytes()).hexdigest()
        return Splits(self.split("train"), self._splits.get("valid"), fingerprint, str(self.path))

    def check_ids(self, vocab: int, progress: Report = quiet) -> None:
        """Scan every token for an id that a vocabulary of this size does not have."""
        done, total = 0, sum(split.tokens for split in self._splits.values())
        for split in self._splits.values():
            for ids in split.scan(vocab):
                done += len(ids)
                progress(done, total)

    def check_documents(self) -> None:
        """Look at where every document begins."""
        for split in self._splits.values():
            split.check_documents()


class Split(TokenRow):
    """The documents of one split as one long row of tokens."""

    def __init__(self, store: TokenStore, name: str, shards: list[DataShard]):
        self.store, self.name = store, name
        self.stores, self.vocab = (store,), store.vocab
        self._shards = [_OpenShard(store, shard) for shard in shards]
        self._token_bounds = list(accumulate((shard.tokens for shard in shards), initial=0))
        self._document_bounds = list(accumulate((shard.documents for shard in shards), initial=0))
        self.tokens, self.documents = self._token_bounds[-1], self._document_bounds[-1]

    def read(self, start: int, stop: int) -> TokenWindow:
        """The tokens [start, stop); an id outside the vocabulary is refused."""
        tokens = np.empty(stop - start, np.int64)
        loss = np.ones(stop - start, bool)
        documents = np.empty(stop - start, np.int64)
        for place, begin, end, at in self._parts(start, stop):
            shard, here = self._shards[place], slice(at, at + end - begin)
            tokens[here] = shard.ids(begin, end, self.vocab)
            documents[here] = shard.document_of(begin, end) + self._document_bounds[place]
            mask = shard.loss(begin, end)
            if mask is not None:
                loss[here] = mask
        return TokenWindow(tokens, loss, documents)

    def ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens [start, stop) alone."""
        parts = [self._shards[p].ids(b, e, self.store.vocab) for p, b, e, _ in self._parts(start, stop)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def scan(self, vocab: int) -> Iterator[Ids]:
        """All tokens in order, in chunks, each checked against the vocabulary."""
        for shard in self._shards:
            for begin in range(0, shard.tokens, _SCAN_SIZE):
                yield shard.ids(begin, min(begin + _SCAN_SIZE, shard.tokens), vocab)

    def loss_tokens(self, start: int, stop: int) -> int:
        """How many of the tokens [start, stop) carry loss, as targets. Only masks are read."""
        masks = ((self._shards[p].loss(b, e), e - b) for p, b, e, _ in self._parts(start, stop))
        return sum(size if mask is None else int(np.count_nonzero(mask)) for mask, size in masks)

    def touch(self, start: int, stop: int) -> None:
        """Count the tokens [start, stop) as read."""
        for place, begin, end, _ in self._parts(start, stop):
            self._shards[place].touch(begin, end)

    def tokens_in(self, store: TokenStore, name: str, begin: int, end: int) -> list[tuple[int, int]]:
        """Which tokens [first, last) depend on some bytes of a file."""
        for base, shard in zip(self._token_bounds, self._shards, strict=False):
            if store is self.store and (tokens := shard.tokens_in(name, begin, end)) is not None:
                return [(base + tokens[0], base + tokens[1])]
        return []

    def document_starts(self) -> NDArray[np.int64]:
        """Where every document begins: 8 bytes each."""
        parts = zip(self._token_bounds, self._shards, strict=False)
        return np.concatenate([base + shard.document_starts() for base, shard in parts])

    def check_documents(self) -> None:
        for shard in self._shards:
            shard.marks  # noqa: B018

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
    """A shard's files. Nothing is opened before it is read: a rank that never comes to a shard never opens it."""

    def __init__(self, store: TokenStore, shard: DataShard):
        self._store, self._shard = store, shard
        self.tokens = shard.tokens

    def touch(self, begin: int, end: int) -> None:
        files, shard, width = self._store.files, self._shard, self._store.dtype.itemsize
        files.touch(shard.token_file, begin * width, end * width)
        files.touch(shard.document_file, 0, shard.document_file.bytes)
        if shard.loss_file:
            files.touch(shard.loss_file, begin, end)

    def tokens_in(self, name: str, begin: int, end: int) -> tuple[int, int] | None:
        width = self._store.dtype.itemsize
        if name == self._shard.token_file.name:
            return begin // width, -(-end // width)
        if self._shard.loss_file and name == self._shard.loss_file.name:
            return begin, end
        return (0, self.tokens) if name == self._shard.document_file.name else None

    def ids(self, begin: int, end: int, vocab: int) -> Ids:
        """The ids, checked. The maximum of a window costs far less than fetching it."""
        file = self._shard.token_file
        ids = np.empty(end - begin, self._store.dtype)
        self._store.files.read(file, begin * ids.itemsize, ids)
        if len(ids) and int(ids.max()) >= vocab:
            place = int(np.argmax(ids >= vocab))
            at = begin + place
            raise UserError(
                f"{self._store.path / file.name}: token {at} (byte {at * ids.itemsize}) is id {int(ids[place])}, but "
                f"the vocabulary has {vocab} ids (0..{vocab - 1}); the file is damaged, or was prepared with another "
                "tokenizer",
                "data.ids",
            )
        return ids

    def loss(self, begin: int, end: int) -> NDArray[np.bool_] | None:
        """The loss mask, or None when all tokens carry loss."""
        file = self._shard.loss_file
        if file is None:
            return None
        mask = np.empty(end - begin, np.uint8)
        self._store.files.read(file, begin, mask)
        if len(mask) and int(mask.max()) > 1:
            place = int(np.argmax(mask > 1))
            raise UserError(
                f"{self._store.path / file.name}: byte {begin + place} is {int(mask[place])}, and a mask has 0 and 1; "
                "the file is damaged",
                "data.mask",
            )
        return mask.astype(bool)

    def document_of(self, begin: int, end: int) -> NDArray[np.int64]:
        """The ordinal in the shard of each token's document."""
        # Of the first tokens in memory, those around the window; between them, the rest from the file.
        low, high = self.marks.searchsorted((begin, end - 1), side="right")
        base = (int(low) - 1) * _REMEMBERED_EVERY
        starts = self._starts(base, min(int(high) * _REMEMBERED_EVERY, self._shard.documents))
        first, last = starts.searchsorted((begin, end - 1), side="right")
        # Lengths of the documents inside the window, from the borders between them.
        borders = np.concatenate(([begin], starts[first:last], [end]))
        return np.repeat(np.arange(base + first - 1, base + last), np.diff(borders))

    def document_starts(self) -> NDArray[np.int64]:
        self.marks  # noqa: B018  # they have been looked at
        return self._starts(0, self._shard.documents)

    @cached_property
    def marks(self) -> NDArray[np.int64]:
        """Where every _EVERY-th document begins. All of them are looked at once: they rise from 0 within the shard."""
        marks, before = [], -1
        for begin in range(0, self._shard.documents, _SCAN_SIZE // 8):
            starts = self._starts(begin, min(begin + _SCAN_SIZE // 8, self._shard.documents))
            wrong = np.diff(starts, prepend=before) <= 0
            wrong[0] |= begin == 0 and starts[0] != 0
            wrong |= starts >= self.tokens
            if wrong.any():
                place = int(np.argmax(wrong))
                at, value = begin + place, int(starts[place])
                raise UserError(
                    f"{self._store.path / self._shard.document_file.name}: document {at} (byte {8 * at}) begins at "
                    f"token {value}, after one that begins at {int(starts[place - 1]) if place else before}; documents "
                    f"begin at 0 and then one after the other below {self.tokens}; the file is damaged",
                    "data.documents",
                )
            before = int(starts[-1])
            marks.append(starts[::_REMEMBERED_EVERY])
        return np.concatenate(marks).copy()

    def _starts(self, begin: int, end: int) -> NDArray[np.int64]:
        """Where documents [begin, end) begin."""
        starts = np.empty(end - begin, "<i8")
        self._store.files.read(self._shard.document_file, 8 * begin, starts)
        return starts
