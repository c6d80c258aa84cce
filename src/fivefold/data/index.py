"""The files of a directory of prepared tokens.

    index.json              this description; written last, so a directory without it is not a prepared one
    train-00000.tokens      token ids, uint16 or uint32, little endian, documents one after another
    train-00000.documents   int64: where each document of the shard begins, counted in tokens from the shard's start
    train-00000.loss        uint8 per token, 1 = carries loss; absent when every token of the shard does
    valid-00000.*           the held-out documents, if any were asked for
    tokenizer.json          a copy of the tokenizer, if it is not bytes

A document never spans two shards, and every document ends with the end-of-document token.
"""

from pathlib import Path
from typing import Literal

import msgspec

from fivefold.support.errors import UserError
from fivefold.support.files import File

NAME = "index.json"
VERSION = 1
SPLITS = ("train", "valid")


class Shard(msgspec.Struct, frozen=True):
    """Some consecutive documents of a split."""

    tokens: int
    documents: int
    token_file: File
    document_file: File
    loss_file: File | None = None

    def files(self) -> list[File]:
        return [self.token_file, self.document_file, *([self.loss_file] if self.loss_file else [])]


class Index(msgspec.Struct, frozen=True):
    """A prepared directory, and how it was prepared. No clock or path in it: the same input gives the same bytes."""

    version: int
    fivefold: str  # the release that wrote it
    tokenizer: str  # "bytes", or the name of the tokenizer's file
    tokenizer_file: File | None
    vocab: int
    end_of_document: int
    dtype: Literal["uint16", "uint32"]
    seed: int
    valid: float
    splits: dict[str, list[Shard]]

    def files(self) -> list[File]:
        """Every file that the directory must hold besides the index."""
        shards = [file for split in self.splits.values() for shard in split for file in shard.files()]
        return [*shards, *([self.tokenizer_file] if self.tokenizer_file else [])]


class _Version(msgspec.Struct):
    version: int


def is_prepared(path: Path) -> bool:
    """Whether a directory was prepared by us and completely (its files are not looked at)."""
    try:
        read_index(path)
    except UserError:
        return False
    return True


def read_index(path: Path) -> Index:
    file = path / NAME
    try:
        text = file.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} is not a directory of prepared tokens: {file} cannot be read ({error.strerror}); "
            "prepare text into it with `fivefold data`"
        ) from error
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version != VERSION:
            raise UserError(
                f"{file} has format version {version}; this release reads version {VERSION}; prepare the text again"
            )
        return msgspec.json.decode(text, type=Index)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} is not an index of prepared tokens or is damaged ({error}); prepare the text again"
        ) from error
