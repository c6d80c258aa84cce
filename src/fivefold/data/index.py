"""The files of a directory of prepared tokens.

    index.json              this description; written last, so a directory without it is not a prepared one
    train-00000.tokens      token ids, uint16 or uint32, little endian, documents one after another
    train-00000.documents   int64: where each document of the shard begins, counted in tokens from the shard's start
    train-00000.loss        uint8 per token, 1 = carries loss; absent when every token of the shard does
    valid-00000.*           the held-out documents, if any were asked for
    tokenizer.json          a copy of the tokenizer, if it is not bytes

A document never spans two shards, and every document ends with the end-of-document token; but a conversation, which
ends as its template has it.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from fivefold.support.errors import UserError
from fivefold.support.files import File, read_regular

INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT_VERSION = 2
UNSEALED_VERSION = 1  # without a seal and without sums of chunks; still read
SPLITS = ("train", "valid")
CHUNK_BYTES = 1 << 22  # each chunk of a file has its own checksum

_MAX_INDEX_BYTES = 1 << 30  # an index of 10 TB has some 50 MB
_SHA256 = re.compile("[0-9a-f]{64}")
_CHUNK_SUMS = re.compile("(?:[0-9a-f]{8})*")
REMEDY = "prepare the text again, or copy the directory again"


class DataFile(File, frozen=True, forbid_unknown_fields=True):
    """A file of the directory. The checksum says whether it is damaged, the sums of its chunks say where."""

    chunks: str = ""  # crc32 of every CHUNK_BYTES bytes, 8 hexadecimal digits each


class DataShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some consecutive documents of a split."""

    tokens: int
    documents: int
    token_file: DataFile
    document_file: DataFile
    loss_file: DataFile | None = None

    def files(self) -> list[DataFile]:
        return [self.token_file, self.document_file, *([self.loss_file] if self.loss_file else [])]


class DataIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prepared directory, and how it was prepared. No clock or path in it: the same input gives the same bytes."""

    version: int
    fivefold: str  # the release that wrote it
    tokenizer: str  # "bytes", or the name of the tokenizer's file
    tokenizer_file: DataFile | None
    vocab: int
    end_of_document: int
    dtype: Literal["uint16", "uint32"]
    seed: int
    valid: float
    splits: dict[str, list[DataShard]]
    # Of conversations, sha256 of the template; not written of anything else, whose seals have always been without it.
    chat_template: str | msgspec.UnsetType = msgspec.UNSET
    seal: str = ""  # sha256 of all of this with an empty seal

    def files(self) -> list[DataFile]:
        """Every file that the directory must hold besides the index."""
        shards = [file for split in self.splits.values() for shard in split for file in shard.files()]
        return [*shards, *([self.tokenizer_file] if self.tokenizer_file else [])]

    @property
    def chats(self) -> bool:
        """Whether its documents are conversations."""
        return isinstance(self.chat_template, str)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files())

    def sealed(self) -> "DataIndex":
        bare = msgspec.structs.replace(self, seal="")
        return msgspec.structs.replace(self, seal=hashlib.sha256(msgspec.json.encode(bare)).hexdigest())

    def problems(self) -> Iterator[str]:
        """Numbers and names that no index has which was written here."""
        width = "uint16" if self.vocab <= 1 << 16 else "uint32"
        rules = [
            (1 <= self.vocab <= 1 << 32, f"vocab={self.vocab} is not a number of ids, 1 to 2^32"),
            (self.dtype == width, f"dtype={self.dtype!r}, but ids below vocab={self.vocab} are stored as {width}"),
            (
                0 <= self.end_of_document < self.vocab,
                f"end_of_document={self.end_of_document} is not an id below vocab={self.vocab}",
            ),
            (0 <= self.valid < 1, f"valid={self.valid} is not a fraction from 0 to below 1"),
            (-(1 << 63) <= self.seed < 1 << 63, f"seed={self.seed} does not fit in 64 bits"),
            (bool(self.splits.get("train")), "it has no shard of the train split"),
            (
                not isinstance(self.chat_template, str) or bool(_SHA256.fullmatch(self.chat_template)),
                f"chat_template={self.chat_template!r} is not 64 hexadecimal digits",
            ),
        ]
        yield from (problem for holds, problem in rules if not holds)
        for split, shards in self.splits.items():
            if split not in SPLITS:
                yield f"there is no split {split!r}; there are {' and '.join(SPLITS)}"
                continue
            for place, shard in enumerate(shards):
                yield from _shard_problems(shard, f"{split}-{place:05d}", 2 if self.dtype == "uint16" else 4)
        if self.tokenizer_file:
            yield from _file_problems(self.tokenizer_file, TOKENIZER_FILE, self.tokenizer_file.bytes)


def _shard_problems(shard: DataShard, name: str, width: int) -> Iterator[str]:
    if not 1 <= shard.documents <= shard.tokens:
        yield f"{name} has {shard.tokens} tokens in {shard.documents} documents, and a document has at least 1 token"
    yield from _file_problems(shard.token_file, f"{name}.tokens", shard.tokens * width)
    yield from _file_problems(shard.document_file, f"{name}.documents", shard.documents * 8)
    if shard.loss_file:
        yield from _file_problems(shard.loss_file, f"{name}.loss", shard.tokens)


def _file_problems(file: DataFile, name: str, size: int) -> Iterator[str]:
    if file.name != name:  # so that none lies outside the directory, and no two are one
        yield f"a file has the name {file.name!r} where it must have {name!r}"
    if file.bytes != size or not 1 <= size < 1 << 63:
        yield f"{name} has {file.bytes} bytes by the index, which does not fit its counts"
    if not _SHA256.fullmatch(file.sha256):
        yield f"the sha256 of {name} is {file.sha256!r}, not 64 hexadecimal digits"
    if file.chunks and (
        not _CHUNK_SUMS.fullmatch(file.chunks) or len(file.chunks) != 8 * -(-file.bytes // CHUNK_BYTES)
    ):
        yield f"the sums of {name} are not one for each {CHUNK_BYTES} of its {file.bytes} bytes"


class _Version(msgspec.Struct):
    version: int


def is_prepared(path: Path) -> bool:
    """Whether a directory was prepared by us and completely (its files are not looked at)."""
    try:
        read_index(path)
    except UserError:
        return False
    return True


def read_index(path: Path) -> DataIndex:
    file = path / INDEX_FILE
    try:
        text = read_regular(file, _MAX_INDEX_BYTES, links=True)
    except OSError as error:
        raise UserError(
            f"{path} is not a directory of prepared tokens: {file} cannot be read ({error.strerror}); "
            "prepare text into it with `fivefold data prepare`",
            "data.index.missing",
        ) from error
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version not in (UNSEALED_VERSION, FORMAT_VERSION):
            raise UserError(
                f"{file} has format version {version}; this release reads version {FORMAT_VERSION}; prepare the text "
                "again",
                "data.index.version",
            )
        index = msgspec.json.decode(text, type=DataIndex)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # the last: lists in lists in lists
        damaged = f"{file} is not an index of prepared tokens or is damaged ({error}); {REMEDY}"
        raise UserError(damaged, "data.index.damaged") from None
    problems = list(index.problems())
    if not problems and version == FORMAT_VERSION and index.sealed().seal != index.seal:
        problems = ["its checksum does not match"]
    if problems:
        raise UserError((f"{file} is damaged: {problem}; {REMEDY}" for problem in problems), "data.index.damaged")
    return index
