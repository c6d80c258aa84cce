"""Write a split as shards: tokens, where documents begin, and a loss mask if one is needed."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.data.index import Shard
from fivefold.support.files import HashedFile

_ONES = 1 << 20  # how many ones of a late loss mask are written at a time


class ShardWriter:
    """The shards of one split. A shard ends with the first document that brings it to `limit` tokens."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype[np.generic], limit: int):
        self._directory, self._split, self._dtype, self._limit = directory, split, dtype, limit
        self._shards: list[Shard] = []
        self._files: dict[str, HashedFile] = {}
        self._tokens = self._documents = 0  # of the shard being written

    def write(self, tokens: NDArray[np.generic], starts: NDArray[np.int64], loss: NDArray[np.bool_] | None) -> None:
        """Append tokens. `starts` says where in them documents begin: none at 0 means that the document before goes
        on. `loss` is None when all of them carry loss."""
        begin = 0
        while begin < len(tokens):
            full = begin + max(self._limit - self._tokens, 0)
            after = int(np.searchsorted(starts, full))
            end = int(starts[after]) if after < len(starts) else len(tokens)
            inside = starts[(starts >= begin) & (starts < end)] - begin
            self._append(tokens[begin:end], inside, None if loss is None else loss[begin:end])
            if end < len(tokens):
                self._finish()
            begin = end

    def close(self) -> list[Shard]:
        """The shards, all of them written."""
        if self._tokens:
            self._finish()
        return self._shards

    def abandon(self) -> None:
        """Close what is open after a failure; its directory is about to be removed."""
        for file in self._files.values():
            file.close()

    def _append(self, tokens: NDArray[np.generic], starts: NDArray[np.int64], loss: NDArray[np.bool_] | None) -> None:
        if not len(tokens):
            return
        if loss is not None and "loss" not in self._files and not loss.all():
            for begin in range(0, self._tokens, _ONES):
                self._write("loss", np.ones(min(_ONES, self._tokens - begin), np.uint8))
        if "loss" in self._files or (loss is not None and not loss.all()):
            self._write("loss", np.ones(len(tokens), np.uint8) if loss is None else loss.astype(np.uint8))
        self._write("tokens", tokens.astype(self._dtype, copy=False))
        self._write("documents", (starts + self._tokens).astype("<i8"))
        self._tokens += len(tokens)
        self._documents += len(starts)

    def _write(self, kind: str, values: NDArray[np.generic]) -> None:
        if kind not in self._files:
            name = f"{self._split}-{len(self._shards):05d}.{kind}"
            self._files[kind] = HashedFile(self._directory / name)
        self._files[kind].write(np.ascontiguousarray(values).view(np.uint8))

    def _finish(self) -> None:
        files = {kind: file.finish() for kind, file in self._files.items()}
        shard = Shard(self._tokens, self._documents, files["tokens"], files["documents"], loss_file=files.get("loss"))
        self._shards.append(shard)
        self._files, self._tokens, self._documents = {}, 0, 0
