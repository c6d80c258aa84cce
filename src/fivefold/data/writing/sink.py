"""Where encoded batches go: each document into its split, and the index last."""

import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import fivefold
from fivefold.data.index import CHUNK, NAME, SPLITS, TOKENIZER, VERSION, DataFile, Index, Shard
from fivefold.data.order import uniform
from fivefold.data.writing.tokenizer import Encoded, Tokenizer
from fivefold.support.errors import UserError
from fivefold.support.files import HashedFile

_ONES = 1 << 20  # how many ones of a late loss mask are written at a time


class Sink:
    """Writes a directory of tokens."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, shard_tokens: int, seed: int, valid: float):
        self._directory, self._tokenizer, self._seed, self._valid = directory, tokenizer, seed, valid
        self._dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
        little = np.dtype(self._dtype).newbyteorder("<")
        self._writers = [ShardWriter(directory, split, little, shard_tokens) for split in SPLITS]
        self._begins = True  # whether the next piece begins a document
        self._least = 1.0  # the smallest draw: a `valid` above it would hold something out
        self.documents, self.tokens = [0, 0], [0, 0]  # of train, of valid

    def write(self, batch: Encoded) -> None:
        """Append a batch; its first piece may go on with the document that the last batch left open."""
        begins = np.concatenate(([self._begins], batch.ends[:-1]))
        ordinals = sum(self.documents) - 1 + np.cumsum(begins)
        self._begins = bool(batch.ends[-1])
        draws = uniform(self._seed, ordinals)
        self._least = min(self._least, float(draws.min()))
        held = draws < self._valid
        for place, writer in enumerate(self._writers):
            mine = held == bool(place)
            if not mine.any():
                continue
            everything = bool(mine.all())
            tokens = batch.tokens if everything else batch.tokens[np.repeat(mine, batch.lengths)]
            lengths, carries = batch.lengths[mine], batch.loss[mine]
            starts = (np.cumsum(lengths) - lengths)[begins[mine]]
            writer.write(tokens, starts, None if carries.all() else np.repeat(carries, lengths))
            self.documents[place] += len(starts)
            self.tokens[place] += len(tokens)

    def finish(self) -> None:
        """Write the index: from now on the directory is complete."""
        self._check_splits()
        splits = {split: writer.close() for split, writer in zip(SPLITS, self._writers, strict=True)}
        index = Index(
            version=VERSION,
            fivefold=fivefold.__version__,
            tokenizer=self._tokenizer.name,
            tokenizer_file=self._copy_tokenizer(),
            vocab=self._tokenizer.vocab,
            end_of_document=self._tokenizer.end,
            dtype="uint16" if self._dtype == "uint16" else "uint32",
            seed=self._seed,
            valid=float(self._valid),  # as it is read: 0 and 0.0 are sealed differently
            splits={split: shards for split, shards in splits.items() if shards},
        )
        text = msgspec.json.format(msgspec.json.encode(index.sealed()), indent=1)
        file = HashedFile(self._directory / NAME)
        file.write(text)
        file.finish()

    def close(self) -> None:
        """Let go of what is still open (after a failure)."""
        for writer in self._writers:
            writer.abandon()

    def _check_splits(self) -> None:
        train, valid = self.documents
        if not train and not valid:
            raise UserError("the input holds no text: every file and record in it is empty")
        if not train:
            raise UserError(
                f"valid={self._valid:g} holds out all {valid} documents and leaves none to train on; "
                "take a smaller fraction, another seed, or more documents"
            )
        if self._valid and not valid:
            # Only happens with few documents, so the advice is exact and comes at once.
            raise UserError(
                f"valid={self._valid:g} holds out none of {train} documents (whole documents are held out, by a hash "
                f"of seed {self._seed}); "
                + (
                    f"valid={np.ceil(self._least * 1e3 + 1e-9) / 1e3:g} holds out one"
                    if train > 1
                    else "split the text into several files, or give a file for validation of its own"
                )
            )

    def _copy_tokenizer(self) -> DataFile | None:
        """The tokens are of little use without what decodes them, so the two travel together."""
        if self._tokenizer.file is None:
            return None
        file = SummedFile(self._directory / TOKENIZER)
        file.write(self._tokenizer.file.read_bytes())
        return file.finish()


class SummedFile(HashedFile):
    """A new file that computes the sums of its chunks as well."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._sums: list[int] = []

    def write(self, data: Any) -> int:
        begin, whole = self.tell(), memoryview(data)
        while whole:
            room = CHUNK - begin % CHUNK
            if room == CHUNK:
                self._sums.append(0)
            self._sums[-1] = zlib.crc32(whole[:room], self._sums[-1])
            begin, whole = begin + len(whole[:room]), whole[room:]
        return super().write(data)

    def finish(self) -> DataFile:
        file = super().finish()
        return DataFile(file.name, file.bytes, file.sha256, "".join(f"{found:08x}" for found in self._sums))


class ShardWriter:
    """Writes the shards of one split: tokens, where documents begin, and a loss mask if one is needed.

    A shard ends with the first document that brings it to `limit` tokens.
    """

    def __init__(self, directory: Path, split: str, dtype: np.dtype[np.generic], limit: int):
        self._directory, self._split, self._dtype, self._limit = directory, split, dtype, limit
        self._shards: list[Shard] = []
        self._files: dict[str, SummedFile] = {}
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
            self._files[kind] = SummedFile(self._directory / name)
        self._files[kind].write(np.ascontiguousarray(values).view(np.uint8))

    def _finish(self) -> None:
        files = {kind: file.finish() for kind, file in self._files.items()}
        shard = Shard(self._tokens, self._documents, files["tokens"], files["documents"], loss_file=files.get("loss"))
        self._shards.append(shard)
        self._files, self._tokens, self._documents = {}, 0, 0
