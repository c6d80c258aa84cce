"""All documents of all files, one after another.

Memory is bounded by a piece for text files, a record for JSONL and a row group for parquet.
"""

import zlib
from collections.abc import Iterator, Sequence

from fivefold.data.writing.pieces import Fields, Piece, Problem
from fivefold.data.writing.records import read_jsonl, read_parquet
from fivefold.data.writing.sources import Meter, Source
from fivefold.data.writing.texts import read_text
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
                    yield from read_text(source.path, stream, decode, meter)
        except (OSError, EOFError, zlib.error) as error:  # the last two: a damaged or cut-off gzip file
            yield Problem(f"{source.path} cannot be read: {getattr(error, 'strerror', None) or error}")
