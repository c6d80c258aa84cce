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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fivefold.data.index import is_prepared
from fivefold.data.progress import Report, quiet
from fivefold.data.writing.documents import documents
from fivefold.data.writing.pieces import Fields
from fivefold.data.writing.sink import Sink
from fivefold.data.writing.sources import Meter, find_sources
from fivefold.data.writing.tokenizer import encoded, load_tokenizer
from fivefold.support.documents import path_of
from fivefold.support.errors import UserError

T = TypeVar("T")

SHARD_TOKENS = 1 << 28
_CLAIM = "claim"


@dataclass(frozen=True)
class Summary:
    """What was prepared, and how fast. Bytes are bytes on disk, so compressed ones of compressed files."""

    out: Path
    documents: int  # in both splits
    tokens: int
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
) -> Summary:
    """Tokenize files into the directory `out`, which appears when it is complete.

    A text file is a document; so is each record of .jsonl (or .jsonl.gz) and each row of .parquet. Every document is
    followed by the end-of-document token. `valid` is the fraction of documents held out, by a hash of (seed, ordinal
    of the document). `progress` is told (bytes read, bytes in all) after every batch; `progress.bar` makes one.

    How records mask the loss is told in `records`: segments and prompts are tokenized separately. Texts above
    a quarter of a million characters are tokenized in parts that end at line ends.

    What limits the speed: for bytes, flushing to the disk and SHA-256 (text), or parsing and copying strings on one
    core (JSONL, parquet). For a tokenizer file the library's encoding, on all cores at 1 to 2 MB/s each, most of it in
    splitting the text by the tokenizer's pattern. Meanwhile one core turns the ids from Python lists into arrays,
    some 70 ns a token, which a machine of several dozen cores would begin to notice.
    """
    started = time.perf_counter()
    inputs, out = [Path(path) for path in inputs], path_of(out)
    problems: list[str] = []  # each check runs whatever the others found, so that all problems are told together
    _checked(problems, lambda: _check_options(text_field, prompt_field, valid, shard_tokens, seed))
    _checked(problems, lambda: check_free(out, overwrite))
    sources = _checked(problems, lambda: find_sources(inputs, out))
    encoder = _checked(problems, lambda: load_tokenizer(tokenizer, eos))
    if sources is None or encoder is None or problems:
        raise UserError(problems)

    meter = Meter()
    total = sum(source.size for source in sources)
    stream = documents(sources, Fields(text_field, prompt_field), encoder.decode, meter)
    with staged(out, overwrite) as directory, closing(Sink(directory, encoder, shard_tokens, seed, valid)) as sink:
        for batch in encoded(stream, encoder, meter):
            sink.write(batch)
            progress(batch.read, total)
        sink.finish()
    return Summary(
        out=out,
        documents=sum(sink.documents),
        tokens=sum(sink.tokens),
        valid_documents=sink.documents[1],
        valid_tokens=sink.tokens[1],
        empty_documents=meter.empty,
        bytes_read=meter.read(),
        seconds=time.perf_counter() - started,
    )


def _checked(problems: list[str], check: Callable[[], T]) -> T | None:
    try:
        return check()
    except UserError as error:
        problems += error.problems
    except OSError as error:
        problems.append(f"{error.filename} cannot be looked at: {error.strerror}")
    return None


def _check_options(text_field: str, prompt_field: str | None, valid: float, shard_tokens: int, seed: int) -> None:
    fields = [name for name in (text_field, prompt_field) if name is not None]
    odd = [name for name in fields if not name.isprintable() or set(name) & set('"\\\\')]
    rules = [
        (
            0 <= valid < 1,
            f"valid={valid:g} is not a fraction of the documents to hold out; 0 (none) to below 1, e.g. 0.01",
        ),
        (
            shard_tokens >= 1,
            f"shard_tokens={shard_tokens} leaves no room for a token; the usual size is {SHARD_TOKENS}",
        ),
        (-(1 << 63) <= seed < 1 << 63, f"seed={seed} does not fit in 64 bits; any smaller integer will do"),
        (
            prompt_field != text_field,
            f"prompt_field and text_field are both {text_field!r}; a prompt is a field of its own",
        ),
        *((False, f"a field named {name!r} is not supported: rename it to letters and digits") for name in odd),
        (
            "segments" not in fields,
            "the field 'segments' holds a list of segments and is always read; name a field of plain text",
        ),
    ]
    if problems := [problem for holds, problem in rules if not holds]:
        raise UserError(problems)


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse a place where something stands that is not ours to replace."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise UserError(f"{out} exists and is not a directory; name a new directory for the tokens")
    if not any(out.iterdir()):
        return
    if not is_prepared(out):
        raise UserError(f"{out} exists and holds other files; name a new or an empty directory for the tokens")
    if not overwrite:
        raise UserError(f"{out} already holds prepared tokens; name another directory, or give --overwrite")


@contextmanager
def staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """A directory to write into; it takes the place of `out` when the block ends well.

    It is a hidden directory beside `out`, so that `out` appears complete or not at all. An exception or an interrupt
    removes it. A killed process leaves it behind, without an index, and the next one of the same name removes it.
    """
    token = secrets.token_hex(4)
    hidden = out.parent / f".{out.name}.{token}.partial"
    try:
        _sweep(out)
        with _claimed(hidden):
            yield hidden
            check_free(out, overwrite)  # again: another process may have been faster
            # Two renames and not one: only an empty directory can be renamed over. Readers hold their files open.
            old = out.parent / f".{out.name}.{token}.old" if out.is_dir() and any(out.iterdir()) else None
            if old:
                os.rename(out, old)
            (hidden / _CLAIM).unlink()
            os.rename(hidden, out)
        if old:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}{_space(out.parent)}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def _claimed(hidden: Path) -> Iterator[None]:
    """A new directory with a file in it that is locked as long as this process lives, however it ends."""
    making = hidden.with_suffix(".making")  # not to be seen before it is locked
    making.mkdir(parents=True)  # mkdir and not mkdtemp: the result must be readable by whoever the umask allows
    with (making / _CLAIM).open("w") as claim:
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
        with suppress(OSError), (path / _CLAIM).open("r+") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)


def _space(place: Path) -> str:
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return ""
    return f" ({free / 1e9:.1f} GB are free there)"
