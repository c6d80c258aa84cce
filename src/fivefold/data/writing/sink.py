"""Where encoded batches go: each document into its split, and the index last."""

from pathlib import Path

import msgspec
import numpy as np

import fivefold
from fivefold.data.index import NAME, SPLITS, VERSION, Index
from fivefold.data.mix import uniform
from fivefold.data.writing.encode import Encoded
from fivefold.data.writing.shards import ShardWriter
from fivefold.data.writing.tokenizer import Tokenizer
from fivefold.support.errors import UserError
from fivefold.support.files import File, HashedFile


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
            valid=self._valid,
            splits={split: shards for split, shards in splits.items() if shards},
        )
        text = msgspec.json.format(msgspec.json.encode(index), indent=1)
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

    def _copy_tokenizer(self) -> File | None:
        """The tokens are of little use without what decodes them, so the two travel together."""
        if self._tokenizer.file is None:
            return None
        file = HashedFile(self._directory / "tokenizer.json")
        file.write(self._tokenizer.file.read_bytes())
        return file.finish()
