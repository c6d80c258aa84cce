"""Records with fields: a line of JSONL or a row of parquet is a document.

A record's text is `text` (or the field that is named instead), and all of it carries loss. Two kinds of record mask:

    {"segments": [{"text": "Q: 2+2? A:", "loss": false}, {"text": " 4"}]}      segments win over the text field
    {"prompt": "Q: 2+2? A:", "text": " 4"}                                     with prompt_field="prompt"

Segments (and the prompt and its answer) are tokenized separately and joined: no token straddles their border, so the
mask is exact, and the prompt has the same ids in training as it has alone at inference. The end-of-document token
carries loss if the last segment does.
"""

import codecs
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from fivefold.data.text_sources import Meter, TextSource
from fivefold.support.errors import Problem, UserError
from fivefold.support.text import did_you_mean

# Pieces: what the tokenizer gets of a document.
#
# A document is one or more pieces: a prompt and its answer (which differ in loss), or the parts of a text too long to
# be tokenized at once.


# Characters, or bytes. A BPE encoder holds hundreds of bytes for each byte of its input, and a long text keeps one core
# busy while the others wait.
PIECE_SIZE = 1 << 18


class TextPiece(NamedTuple):
    """Some text of a document."""

    text: str | bytes
    loss: bool  # whether its tokens carry loss
    ends: bool  # whether the document ends with it


class Fields(NamedTuple):
    """Where a record keeps its text."""

    text: str = "text"
    prompt: str | None = None


def in_pieces(chunks: Iterable[str]) -> Iterator[str]:
    """The same text in pieces of at most PIECE characters, cut where a tokenizer would not notice if possible."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        begin = 0
        while len(rest) - begin > PIECE_SIZE:
            end = _cut(rest, begin)
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest:
        yield rest


def _cut(text: str, begin: int) -> int:
    """Where to end the piece that starts at `begin`: after the last line end between two lines of text.

    The splitting patterns of GPT-2, GPT-4 and Llama 3 all break after a single line end with no space around it, so
    the ids equal the whole text's. Failing that, after any line end; failing that, anywhere.
    """
    limit = begin + PIECE_SIZE
    last = at = text.rfind("\n", begin, limit)
    while at > limit - PIECE_SIZE // 16:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
        at = text.rfind("\n", begin, at)
    return last + 1 if last > begin else limit


MAX_LINE_BYTES = 128 << 20  # of JSONL, which is in memory with its text; a text file may have any size
_PARQUET_ROWS = 256  # of parquet, decoded at a time
_MAX_EXPLAINED_BYTES = (
    1 << 20
)  # bytes of a line that is decoded into objects, which take many times as much, to explain it
_BOM = b"\xef\xbb\xbf"


class TextSegment(msgspec.Struct, forbid_unknown_fields=True):
    """Some text of a record, with or without loss. Strict: a misspelled `loss` would train on what it should not."""

    text: str
    loss: bool = True


def read_jsonl(path: Path, stream: IO[bytes], fields: Fields, meter: Meter) -> Iterator[TextPiece | Problem]:
    """The documents of JSON lines; blank lines are passed over."""
    decode = msgspec.json.Decoder(_record(fields)).decode
    for place, line in numbered_lines(path, stream):
        if isinstance(line, Problem):
            yield line
            continue
        try:
            record = decode(line)
            if record.segments is None and (record.text is None or (fields.prompt and record.prompt is None)):
                yield _at(place, _explain(line, fields, None))
                continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield _at(place, _explain(line, fields, error))
            continue
        yield from _document(record.text, record.prompt, record.segments, meter)


def numbered_lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, bytes | Problem]]:
    """The lines that are not blank, each with its place; in place of one that is too long, a sentence."""
    for number, line in enumerate(_lines(stream), 1):
        place = f"{path}:{number}"
        if line is None:
            most = f"{place}: a line of more than {MAX_LINE_BYTES >> 20} MiB is not read"
            yield place, Problem("record.long", f"{most}; write its text to a text file, or divide the record")
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.isspace():
            yield place, line


def _lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """The lines of a file; None in place of one that is too long, whose end is looked for piece by piece."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(_MAX_EXPLAINED_BYTES)
        yield None


def read_parquet(source: TextSource, fields: Fields, meter: Meter) -> Iterator[TextPiece | Problem]:
    """The documents of a parquet file, a few rows at a time."""
    import pyarrow.parquet  # slow to import, and optional: that it is there was checked when the file was found

    try:
        with meter.file(source), pyarrow.parquet.ParquetFile(source.path, buffer_size=1 << 20) as file:
            columns: list[str] = file.schema_arrow.names
            wanted = ["segments"] if "segments" in columns else [n for n in (fields.text, fields.prompt) if n]
            if missing := [name for name in wanted if name not in columns]:
                for name in missing:
                    yield _at(str(source.path), _no_field(name, columns))
                return
            number, rows = 0, max(file.metadata.num_rows, 1)
            meter.position = lambda: source.size * number // rows
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=wanted):
                values = {name: batch.column(name).to_pylist() for name in wanted}
                for row in zip(*(values[name] for name in wanted), strict=True):
                    number += 1
                    yield from _row(source.path, number, dict(zip(wanted, row, strict=True)), fields, meter)
    except pyarrow.ArrowException as error:
        yield Problem("prepare.parquet", f"{source.path} is not a readable parquet file: {error}")


def _row(path: Path, number: int, row: dict[str, Any], fields: Fields, meter: Meter) -> Iterator[TextPiece | Problem]:
    try:
        if "segments" in row:
            yield from _document(None, None, msgspec.convert(row["segments"], list[TextSegment]), meter)
            return
    except msgspec.ValidationError as error:
        yield Problem("record.segments", f"{path}, row {number}: {error}")
        return
    for name, value in row.items():
        if not isinstance(value, str):
            yield _at(f"{path}, row {number}", _not_text(name, value))
            return
    yield from _document(row[fields.text], row.get(fields.prompt or ""), None, meter)


def _document(
    text: str | None, prompt: str | None, segments: Sequence[TextSegment] | None, meter: Meter
) -> Iterator[TextPiece]:
    if segments is None and prompt is None and text is not None and len(text) <= PIECE_SIZE:
        if text:
            yield TextPiece(text, loss=True, ends=True)
        else:
            meter.empty += 1
        return
    if segments is None:
        segments = [TextSegment(prompt, loss=False)] if prompt is not None else []
        segments = [*segments, TextSegment(text or "")]
    if not any(segment.text for segment in segments):
        meter.empty += 1
        return
    for place, segment in enumerate(segments):
        ends, held = place == len(segments) - 1, ""
        for part in in_pieces([segment.text]):
            if held:
                yield TextPiece(held, segment.loss, ends=False)
            held = part
        if held or ends:
            yield TextPiece(held, segment.loss, ends=ends)


def _record(fields: Fields) -> type[Any]:
    """A struct of the wanted fields only: the decoder then steps over all others without building them."""
    wanted: list[tuple[str, Any, Any]] = [("text", str | None, None), ("segments", list[TextSegment] | None, None)]
    rename = {"text": fields.text, "segments": "segments"}
    if fields.prompt:
        wanted.append(("prompt", str | None, None))
        rename["prompt"] = fields.prompt
    # Without a prompt field every record has the same one: none.
    return msgspec.defstruct("Record", wanted, rename=rename, namespace={} if fields.prompt else {"prompt": None})


def _at(place: str, problem: Problem) -> Problem:
    return Problem(problem.code, f"{place}: {problem}")


def _explain(line: bytes, fields: Fields, error: Exception | None) -> Problem:
    """What is wrong with a record: found slowly, because it is found once."""
    if len(line) > _MAX_EXPLAINED_BYTES:
        return Problem(
            "record.syntax" if error else "record.field",
            str(error or f"no field {fields.text!r} among the wanted ones"),
        )
    try:
        record = msgspec.json.decode(line)
    except RecursionError:
        return Problem("record.syntax", "its values are nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        example = f'a line is one record, for example {{"{fields.text}": "..."}}'
        return Problem("record.syntax", f"not JSON: {reason}; {example}")
    if not isinstance(record, dict):
        wanted = f'a record is an object like {{"{fields.text}": "..."}}, not {type_name(record)}'
        return Problem("record.object", wanted)
    if record.get("segments") is None:
        for name in (fields.text, fields.prompt):
            if name is not None and name not in record:
                return _no_field(name, list(record))
            if name is not None and not isinstance(record[name], str):
                return _not_text(name, record[name])
    return Problem("record.segments", f'{error}; segments look like [{{"text": "...", "loss": false}}, ...]')


def _no_field(name: str, names: Sequence[str]) -> Problem:
    among = f" among {', '.join(map(repr, names))}; {did_you_mean(name, names)}" if names else ": the record is empty"
    return Problem("record.field", f"no field {name!r}{among}")


def _not_text(name: str, value: object) -> Problem:
    return Problem("record.text", f"field {name!r} is {type_name(value)}; a string is needed")


_TYPE_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def type_name(value: object) -> str:
    return _TYPE_NAMES.get(type(value), type(value).__name__)


# ---- documents ------------------------------------------------------------------------------------------------------
# All documents of all files, one after another.
#
# Memory is bounded by a piece for text files, a record for JSONL and a row group for parquet.


MAX_PROBLEMS = 10
LOOK_AHEAD_BYTES = 256 << 20  # bytes that are read on after a problem, to report its neighbours together with it


def documents(sources: Sequence[TextSource], fields: Fields, *, decode: bool, meter: Meter) -> Iterator[TextPiece]:
    """The pieces of all sources in order, texts as `str` if `decode`.

    After the first problem nothing more is yielded: the input is only read a little further, to name up to ten.
    """
    problems: list[Problem] = []
    first = 0  # bytes read at the first of them
    for item in _items(sources, fields, decode=decode, meter=meter):
        if isinstance(item, Problem):
            first = first if problems else meter.read()
            problems.append(item)
            if len(problems) == MAX_PROBLEMS:
                stopped = f"stopped after {MAX_PROBLEMS} problems; there may be more"
                problems.append(Problem("problems.more", stopped))
                break
        elif not problems:
            yield item
        elif meter.read() - first > LOOK_AHEAD_BYTES:
            break
    if problems:
        raise UserError(problems)


UNREADABLE = (OSError, EOFError, zlib.error)  # the last two: a damaged or cut-off gzip file


def unreadable(path: Path, error: Exception) -> Problem:
    return Problem("file.read", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")


def _items(
    sources: Sequence[TextSource], fields: Fields, *, decode: bool, meter: Meter
) -> Iterator[TextPiece | Problem]:
    for source in sources:
        try:
            if source.kind == "parquet":
                yield from read_parquet(source, fields, meter)
                continue
            with meter.open(source) as stream:
                if source.kind == "jsonl":
                    yield from read_jsonl(source.path, stream, fields, meter)
                else:
                    yield from _read_text(source.path, stream, decode=decode, meter=meter)
        except UNREADABLE as error:
            yield unreadable(source.path, error)


def _read_text(path: Path, stream: IO[bytes], *, decode: bool, meter: Meter) -> Iterator[TextPiece | Problem]:
    """The pieces of a file that is one document: as `str` if `decode`, else its bytes, all of them unchanged."""
    chunks: Iterator[bytes] = iter(lambda: stream.read(PIECE_SIZE), b"")
    texts: Iterator[str] | Iterator[bytes] = in_pieces(_decode_chunks(chunks)) if decode else chunks
    last: str | bytes | None = None
    try:
        for text in texts:
            if last is not None:
                yield TextPiece(last, loss=True, ends=False)
            last = text
    except _NotUtf8 as error:
        yield Problem(
            "prepare.input.utf8",
            f"{path} is not UTF-8: byte {error.offset} is 0x{error.byte:02x}; convert the file, leave it out, "
            'or tokenize as "bytes", which takes any',
        )
        return
    if last is None:
        meter.empty += 1
    else:
        yield TextPiece(last, loss=True, ends=True)


class _NotUtf8(Exception):
    def __init__(self, offset: int, byte: int):
        self.offset, self.byte = offset, byte


def _decode_chunks(chunks: Iterable[bytes]) -> Iterator[str]:
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
