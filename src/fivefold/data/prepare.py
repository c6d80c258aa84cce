"""Text into tokens.

    prepare([Path("essays"), Path("more.jsonl.gz")], Path("tokens"), tokenizer="tokenizer.json", valid=0.01)

Documents stream through: memory is bounded by a few batches of text, whatever the input size. One thread reads and
encodes while another hashes and writes.
"""

import fcntl
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fivefold.data.chat_template import ChatTemplate
from fivefold.data.chats import check_kinds, check_options, encode_chats, with_places
from fivefold.data.documents import Fields, documents
from fivefold.data.index import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    INDEX_FILE,
    SPLITS,
    TOKENIZER_FILE,
    DataFile,
    DataIndex,
    DataShard,
    is_prepared,
)
from fivefold.data.order import uniform
from fivefold.data.text_sources import Meter, find_sources
from fivefold.data.tokenizer import Encoded, Tokenizer, encode_stream, load_tokenizer
from fivefold.support.errors import Problem, UserError
from fivefold.support.files import HashedFile
from fivefold.support.parsing import path_of
from fivefold.support.progress import Report, quiet
from fivefold.version import __version__

# ---- sink -----------------------------------------------------------------------------------------------------------
# Where encoded batches go: each document into its split, and the index last.


_ONES_AT_ONCE = 1 << 20  # how many ones of a late loss mask are written at a time


class Sink:
    """Writes a directory of tokens."""

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, shard_tokens: int, seed: int, valid: float, template: str = ""
    ):
        self._template = template  # sha256 of what conversations were rendered with
        self._directory, self._tokenizer, self._seed, self._valid = directory, tokenizer, seed, valid
        self._dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
        little = np.dtype(self._dtype).newbyteorder("<")
        self._writers = [ShardWriter(directory, split, little, shard_tokens) for split in SPLITS]
        self._begins = True  # whether the next piece begins a document
        self._least = 1.0  # the smallest draw: a `valid` above it would hold something out
        self.documents, self.tokens = [0, 0], [0, 0]  # of train, of valid
        self.loss_tokens = self.longest = 0  # of both
        self._open_tokens = 0  # of the document that the last batch left open

    def write(self, batch: Encoded) -> None:
        """Append a batch; its first piece may go on with the document that the last batch left open."""
        begins = np.concatenate(([self._begins], batch.ends[:-1]))
        ordinals = sum(self.documents) - 1 + np.cumsum(begins)
        self._begins = bool(batch.ends[-1])
        draws = uniform(self._seed, ordinals)
        self._least = min(self._least, float(draws.min()))
        held = draws < self._valid
        for place, writer in enumerate(self._writers):
            chosen = held == bool(place)
            if not chosen.any():
                continue
            tokens = batch.tokens if chosen.all() else batch.tokens[np.repeat(chosen, batch.lengths)]
            lengths, carries = batch.lengths[chosen], batch.loss[chosen]
            starts = (np.cumsum(lengths) - lengths)[begins[chosen]]
            writer.write(tokens, starts, None if carries.all() else np.repeat(carries, lengths))
            self.documents[place] += len(starts)
            self.tokens[place] += len(tokens)
        self.loss_tokens += int(batch.lengths[batch.loss].sum())
        sizes = np.diff(np.cumsum(batch.lengths)[batch.ends], prepend=-self._open_tokens)
        self.longest = max(self.longest, int(sizes.max(initial=0)))
        self._open_tokens += int(batch.lengths.sum()) - int(sizes.sum())

    def finish(self) -> None:
        """Write the index: from now on the directory is complete."""
        self._check_splits()
        splits = {split: writer.close() for split, writer in zip(SPLITS, self._writers, strict=True)}
        index = DataIndex(
            version=FORMAT_VERSION,
            fivefold=__version__,
            tokenizer=self._tokenizer.name,
            tokenizer_file=self._copy_tokenizer(),
            vocab=self._tokenizer.vocab,
            end_of_document=self._tokenizer.end,
            dtype="uint16" if self._dtype == "uint16" else "uint32",
            seed=self._seed,
            valid=float(self._valid),  # as it is read: 0 and 0.0 are sealed differently
            splits={split: shards for split, shards in splits.items() if shards},
            chat_template=self._template or msgspec.UNSET,
        )
        text = msgspec.json.format(msgspec.json.encode(index.sealed()), indent=1)
        file = HashedFile(self._directory / INDEX_FILE)
        file.write(text)
        file.finish()

    def close(self) -> None:
        """Let go of what is still open (after a failure)."""
        for writer in self._writers:
            writer.abandon()

    def _check_splits(self) -> None:
        train, valid = self.documents
        if not train and not valid:
            raise UserError("the input holds no text: every file and record in it is empty", "prepare.input.empty")
        if not train:
            raise UserError(
                f"valid={self._valid:g} holds out all {valid} documents and leaves none to train on; "
                "take a smaller fraction, another seed, or more documents",
                "prepare.valid.all",
            )
        if self._valid and not valid:
            # Only happens with few documents, so the advice is exact and comes at once.
            advice = "split the text into several files, or give a file for validation of its own"
            if train > 1:
                advice = f"valid={np.ceil(self._least * 1e3 + 1e-9) / 1e3:g} holds out one"
            raise UserError(
                f"valid={self._valid:g} holds out none of {train} documents (whole documents are held out, by a hash "
                f"of seed {self._seed}); {advice}",
                "prepare.valid.none",
            )

    def _copy_tokenizer(self) -> DataFile | None:
        """The tokens are of little use without what decodes them, so the two travel together."""
        if self._tokenizer.file is None:
            return None
        file = SummedFile(self._directory / TOKENIZER_FILE)
        file.write(self._tokenizer.file.read_bytes())
        return file.finish()


class SummedFile(HashedFile):
    """A new file that computes the sums of its chunks as well."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._sums: list[int] = []

    def write(self, data: Any) -> int:
        begin, rest = self.tell(), memoryview(data)
        while rest:
            room = CHUNK_BYTES - begin % CHUNK_BYTES
            if room == CHUNK_BYTES:
                self._sums.append(0)
            self._sums[-1] = zlib.crc32(rest[:room], self._sums[-1])
            begin, rest = begin + len(rest[:room]), rest[room:]
        return super().write(data)

    def finish(self) -> DataFile:
        file = super().finish()
        return DataFile(file.name, file.bytes, file.sha256, "".join(f"{crc:08x}" for crc in self._sums))


class ShardWriter:
    """Writes the shards of one split: tokens, where documents begin, and a loss mask if one is needed.

    A shard ends with the first document that brings it to `limit` tokens.
    """

    def __init__(self, directory: Path, split: str, dtype: np.dtype[np.generic], limit: int):
        self._directory, self._split, self._dtype, self._limit = directory, split, dtype, limit
        self._shards: list[DataShard] = []
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

    def close(self) -> list[DataShard]:
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
            for begin in range(0, self._tokens, _ONES_AT_ONCE):
                self._write("loss", np.ones(min(_ONES_AT_ONCE, self._tokens - begin), np.uint8))
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
        shard = DataShard(
            self._tokens, self._documents, files["tokens"], files["documents"], loss_file=files.get("loss")
        )
        self._shards.append(shard)
        self._files, self._tokens, self._documents = {}, 0, 0


# ---- prepare --------------------------------------------------------------------------------------------------------


T = TypeVar("T")

SHARD_TOKENS = 1 << 28
_CLAIM_FILE = "claim"


@dataclass(frozen=True)
class PrepareSummary:
    """What was prepared, and how fast. Bytes are bytes on disk, so compressed ones of compressed files."""

    out: Path
    documents: int  # in both splits
    tokens: int
    loss_tokens: int  # those that carry loss
    longest: int  # tokens of the longest document
    valid_documents: int
    valid_tokens: int
    empty_documents: int  # held no text, and were left out
    bytes_read: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def megabytes_per_second(self) -> float:
        """Input read per second, in 10**6 bytes."""
        return self.bytes_read / max(self.seconds, 1e-9) / 1e6


def prepare(
    inputs: Sequence[Path],
    out: Path,
    *,
    tokenizer: str | Path = "bytes",
    eos: str | int | None = None,
    text_field: str = "text",
    prompt_field: str | None = None,
    valid: float = 0.0,
    shard_tokens: int = SHARD_TOKENS,
    seed: int = 0,
    overwrite: bool = False,
    progress: Report = quiet,
    chat: bool = False,
    chat_template: Path | None = None,
    date: str = "",
) -> PrepareSummary:
    """Tokenize files into the directory `out`, which appears when it is complete.

    A text file is a document; so is each record of .jsonl (or .jsonl.gz) and each row of .parquet. Every document is
    followed by the end-of-document token. `valid` is the fraction of documents held out, by a hash of (seed, ordinal
    of the document). `progress` is told (bytes read, bytes in all) after every batch; `progress.bar` makes one.

    With `chat`, each line of JSONL is a conversation, which the tokenizer's own chat template renders, or
    `chat_template`; a `date` is what templates write that ask for today's (`data/chats.py`).

    How records mask the loss is told in `data/documents.py`: segments and prompts are tokenized separately. Texts above
    a quarter of a million characters are tokenized in parts that end at line ends.

    What limits the speed: for bytes, flushing to the disk and SHA-256 (text), or parsing and copying strings on one
    core (JSONL, parquet). For a tokenizer file the library's encoding, on all cores at 1 to 2 MB/s each, most of it in
    splitting the text by the tokenizer's pattern. Meanwhile one core turns the ids from Python lists into arrays,
    some 70 ns a token, which a machine of several dozen cores would begin to notice.
    """
    started = time.perf_counter()
    inputs, out = [Path(path) for path in inputs], path_of(out)
    problems: list[str] = []  # each check runs whatever the others found, so that all problems are told together
    _collect_problems(problems, lambda: _check_options(text_field, prompt_field, valid, shard_tokens, seed))
    _collect_problems(problems, lambda: check_options(prompt_field, chat_template, date, chat=chat))
    _collect_problems(problems, lambda: check_free(out, overwrite=overwrite))
    sources = _collect_problems(problems, lambda: find_sources(inputs, out))
    encoder = _collect_problems(problems, lambda: load_tokenizer(tokenizer, eos))
    if sources is None or encoder is None or problems:
        raise UserError(problems)

    meter, template = Meter(), None
    total = sum(source.size for source in sources)
    with ExitStack() as stack:
        if chat:
            tokens = with_places(encoder)
            check_kinds(sources)
            template = stack.enter_context(closing(ChatTemplate.of(tokens.path, chat_template, date)))
            batches = encode_chats(sources, template, tokens, meter)
        else:
            stream = documents(sources, Fields(text_field, prompt_field), decode=encoder.decode, meter=meter)
            batches = encode_stream(stream, encoder, meter)
        directory = stack.enter_context(staging_directory(out, overwrite=overwrite))
        made_with = template.sha256 if template else ""
        sink = stack.enter_context(closing(Sink(directory, encoder, shard_tokens, seed, valid, made_with)))
        stack.enter_context(closing(batches))  # its thread has ended when the template's process is
        for batch in batches:
            sink.write(batch)
            progress(batch.read, total)
        sink.finish()
    return PrepareSummary(
        out=out,
        documents=sum(sink.documents),
        tokens=sum(sink.tokens),
        loss_tokens=sink.loss_tokens,
        longest=sink.longest,
        valid_documents=sink.documents[1],
        valid_tokens=sink.tokens[1],
        empty_documents=meter.empty,
        bytes_read=meter.read(),
        seconds=time.perf_counter() - started,
    )


def _collect_problems(problems: list[str], check: Callable[[], T]) -> T | None:
    try:
        return check()
    except UserError as error:
        problems += error.coded
    except OSError as error:
        problems.append(Problem("file.read", f"{error.filename} cannot be accessed: {error.strerror}"))
    return None


def _check_options(text_field: str, prompt_field: str | None, valid: float, shard_tokens: int, seed: int) -> None:
    fields = [name for name in (text_field, prompt_field) if name is not None]
    problems = []
    if not 0 <= valid < 1:
        share = f"valid={valid:g} is not a fraction of the documents to hold out; 0 (none) to below 1, e.g. 0.01"
        problems.append(Problem("prepare.valid.range", share))
    if shard_tokens < 1:
        room = f"shard_tokens={shard_tokens} leaves no room for a token; the usual size is {SHARD_TOKENS}"
        problems.append(Problem("prepare.shard_tokens.range", room))
    if not -(1 << 63) <= seed < 1 << 63:
        wide = f"seed={seed} does not fit in 64 bits; any smaller integer will do"
        problems.append(Problem("prepare.seed.range", wide))
    if prompt_field == text_field:
        same = f"prompt_field and text_field are both {text_field!r}; a prompt is a field of its own"
        problems.append(Problem("prepare.prompt_field.text", same))
    for name in fields:
        if not name.isprintable() or set(name) & set('"\\\\'):
            odd = f"a field named {name!r} is not supported: rename it to letters and digits"
            problems.append(Problem("prepare.field.name", odd))
    if "segments" in fields:
        taken = "the field 'segments' holds a list of segments and is always read; name a field of plain text"
        problems.append(Problem("prepare.field.segments", taken))
    if problems:
        raise UserError(problems)


def check_free(out: Path, *, overwrite: bool) -> None:
    """Refuse a place where something stands that is not ours to replace."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise UserError(f"{out} exists and is not a directory; name a new directory for the tokens", "output.taken")
    if not any(out.iterdir()):
        return
    if not is_prepared(out):
        other = f"{out} exists and holds other files; name a new or an empty directory for the tokens"
        raise UserError(other, "output.taken")
    if not overwrite:
        tokens = f"{out} already holds prepared tokens; name another directory, or give --overwrite"
        raise UserError(tokens, "output.taken")


@contextmanager
def staging_directory(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory to write into; it takes the place of `out` when the block ends well.

    It is a hidden directory next to `out`, so that `out` appears complete or not at all. An exception or an interrupt
    removes it. A killed process leaves it behind, without an index, and the next one of the same name removes it.
    """
    token = secrets.token_hex(4)
    hidden = out.parent / f".{out.name}.{token}.partial"
    try:
        _sweep(out)
        with _claimed_directory(hidden):
            yield hidden
            check_free(out, overwrite=overwrite)  # again: another process may have been faster
            # Two renames and not one: only an empty directory can be renamed over. Readers hold their files open.
            old = out.parent / f".{out.name}.{token}.old" if out.is_dir() and any(out.iterdir()) else None
            if old:
                os.rename(out, old)
            (hidden / _CLAIM_FILE).unlink()
            os.rename(hidden, out)
        if old:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        why = f"{error.strerror or error}{_space(out.parent)}"
        raise UserError(f"cannot write {out}: {why}", "file.write") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def _claimed_directory(hidden: Path) -> Iterator[None]:
    """A new directory with a file in it that is locked as long as this process lives, however it ends."""
    making = hidden.with_suffix(".making")  # not to be seen before it is locked
    making.mkdir(parents=True)  # mkdir and not mkdtemp: the result must be readable by whoever the umask allows
    with (making / _CLAIM_FILE).open("w") as claim:
        with suppress(OSError):  # a file system without locks, on which nobody sweeps
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        making.rename(hidden)
        yield


def _sweep(out: Path) -> None:
    """Remove what killed processes left of `out`: what nobody has a lock on, and old tokens that have been replaced."""
    name = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.(partial|old)")
    left = [path for path in out.parent.iterdir() if name.fullmatch(path.name)] if out.parent.is_dir() else []
    for path in left:
        if path.suffix == ".old":
            if is_prepared(out):
                shutil.rmtree(path, ignore_errors=True)
            continue
        with suppress(OSError), (path / _CLAIM_FILE).open("r+") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)


def _space(place: Path) -> str:
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return ""
    return f" ({free / 1e9:.1f} GB are free there)"
