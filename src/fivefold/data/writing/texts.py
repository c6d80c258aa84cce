"""A text file is one document, read a piece at a time."""

import codecs
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO

from fivefold.data.writing.pieces import PIECE, Piece, Problem, in_pieces
from fivefold.data.writing.sources import Meter


def read_text(path: Path, stream: IO[bytes], decode: bool, meter: Meter) -> Iterator[Piece | Problem]:
    """The pieces of one file: as `str` if `decode`, else its very bytes (no newline or encoding is touched)."""
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
