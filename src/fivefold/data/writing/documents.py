"""All documents of all files, one after another.

Memory is bounded by a piece for text files, a record for JSONL and a row group for parquet.
"""

import codecs
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO

from fivefold.data.writing.pieces import PIECE, Fields, Piece, Problem, in_pieces
from fivefold.data.writing.records import read_jsonl, read_parquet
from fivefold.data.writing.sources import Meter, Source
from fivefold.support.errors import UserError

MOST_PROBLEMS = 10
LOOK_AHEAD = 256 << 20  # bytes that are read on after a problem, to report its neighbours together with it


def documents(sources: Sequence[Source], fields: Fields, decode: bool, meter: Meter) -> Iterator[Piece]:
    """The pieces of all sources in order, texts as `str` if `decode`.

    After the first problem nothing more is yielded: the input is only read a little further, to name up to ten.
    """
    problems: list[str] = []
    found = 0
    for item in _items(sources, fields, decode, meter):
        if isinstance(item, Problem):
            found = found if problems else meter.read()
            problems.append(item.sentence)
            if len(problems) == MOST_PROBLEMS:
                problems.append(f"stopped after {MOST_PROBLEMS} problems; there may be more")
                break
        elif not problems:
            yield item
        elif meter.read() - found > LOOK_AHEAD:
            break
    if problems:
        raise UserError(problems)


def _items(sources: Sequence[Source], fields: Fields, decode: bool, meter: Meter) -> Iterator[Piece | Problem]:
    for source in sources:
        try:
            if source.kind == "parquet":
                yield from read_parquet(source, fields, meter)
                continue
            with meter.open(source) as stream:
                if source.kind == "jsonl":
                    yield from read_jsonl(source.path, stream, fields, meter)
                else:
                    yield from _read_text(source.path, stream, decode, meter)
        except (OSError, EOFError, zlib.error) as error:  # the last two: a damaged or cut-off gzip file
            yield Problem(f"{source.path} cannot be read: {getattr(error, 'strerror', None) or error}")


def _read_text(path: Path, stream: IO[bytes], decode: bool, meter: Meter) -> Iterator[Piece | Problem]:
    """The pieces of a file that is one document: as `str` if `decode`, else its bytes, all of them unchanged."""
    chunks: Iterator[bytes] = iter(lambda: stream.read(PIECE), b"")
    texts: Iterator[str] | Iterator[bytes] = in_pieces(_decoded(chunks)) if decode else chunks
    last: str | bytes | None = None
    try:
        for text in texts:
            if last is not None:
                yield Piece(last, loss=True, ends=False)
            last = text
    except _NotUtf8 as error:
        yield Problem(
            f"{path} is not UTF-8: byte {error.offset} is 0x{error.byte:02x}; convert the file, leave it out, "
            'or tokenize as "bytes", which takes any'
        )
        return
    if last is None:
        meter.empty += 1
    else:
        yield Piece(last, loss=True, ends=True)


class _NotUtf8(Exception):
    def __init__(self, offset: int, byte: int):
        self.offset, self.byte = offset, byte


def _decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    """UTF-8 chunk by chunk; a character may lie across two."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    fed = 0
    for chunk in chain(chunks, [b""]):
        pending = len(decoder.getstate()[0])
        try:
            yield decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise _NotUtf8(fed - pending + error.start, error.object[error.start]) from error
        fed += len(chunk)
