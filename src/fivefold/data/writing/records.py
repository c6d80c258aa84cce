"""Records with fields: a line of JSONL or a row of parquet is a document.

A record's text is `text` (or the field that is named instead), all of which carries loss. Two kinds of record mask:

    {"segments": [{"text": "Q: 2+2? A:", "loss": false}, {"text": " 4"}]}      segments win over the text field
    {"prompt": "Q: 2+2? A:", "text": " 4"}                                     with prompt_field="prompt"

Segments (and the prompt and its answer) are tokenized separately and joined: no token straddles their border, so the
mask is exact, and the prompt has the same ids in training as it has alone at inference. The end-of-document token
carries loss if the last segment does.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from fivefold.data.writing.pieces import PIECE, Fields, Piece, Problem, in_pieces
from fivefold.data.writing.sources import Meter, Source
from fivefold.support.formatting import did_you_mean

LONGEST = 128 << 20  # bytes of a line of JSONL, which is in memory with its text; a text file may be of any size
_ROWS = 256  # of parquet, decoded at a time
_SHORT = 1 << 20  # bytes of a line that is decoded into objects, which take many times as much, to explain it
_BOM = b"\xef\xbb\xbf"


class Segment(msgspec.Struct, forbid_unknown_fields=True):
    """Some text of a record, with or without loss. Strict: a misspelled `loss` would train on what it should not."""

    text: str
    loss: bool = True


def read_jsonl(path: Path, stream: IO[bytes], fields: Fields, meter: Meter) -> Iterator[Piece | Problem]:
    """The documents of JSON lines; blank lines are passed over."""
    decode = msgspec.json.Decoder(_record(fields)).decode
    for number, line in enumerate(_lines(stream), 1):
        if line is None:
            yield Problem(
                f"{path}:{number}: a line of more than {LONGEST >> 20} MiB is not read; write its text to a text file, "
                "or divide the record"
            )
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.isspace():
            continue
        try:
            record = decode(line)
            if record.segments is None and (record.text is None or (fields.prompt and record.prompt is None)):
                yield Problem(f"{path}:{number}: {_explain(line, fields, None)}")
                continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield Problem(f"{path}:{number}: {_explain(line, fields, error)}")
            continue
        yield from _document(record.text, record.prompt, record.segments, meter)


def _lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """The lines of a file; None in place of one that is too long, whose end is looked for piece by piece."""
    while line := stream.readline(LONGEST + 1):
        if len(line) <= LONGEST:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(_SHORT)
        yield None


def read_parquet(source: Source, fields: Fields, meter: Meter) -> Iterator[Piece | Problem]:
    """The documents of a parquet file, a few rows at a time."""
    import pyarrow.parquet  # slow to import, and optional: that it is there was checked when the file was found

    try:
        with meter.file(source), pyarrow.parquet.ParquetFile(source.path, buffer_size=1 << 20) as file:
            columns: list[str] = file.schema_arrow.names
            wanted = ["segments"] if "segments" in columns else [n for n in (fields.text, fields.prompt) if n]
            if missing := [name for name in wanted if name not in columns]:
                for name in missing:
                    yield Problem(f"{source.path}: {_no_field(name, columns)}")
                return
            number, rows = 0, max(file.metadata.num_rows, 1)
            meter.position = lambda: source.size * number // rows
            for batch in file.iter_batches(batch_size=_ROWS, columns=wanted):
                values = {name: batch.column(name).to_pylist() for name in wanted}
                for row in zip(*(values[name] for name in wanted), strict=True):
                    number += 1
                    yield from _row(source.path, number, dict(zip(wanted, row, strict=True)), fields, meter)
    except pyarrow.ArrowException as error:
        yield Problem(f"{source.path} is not a readable parquet file: {error}")


def _row(path: Path, number: int, row: dict[str, Any], fields: Fields, meter: Meter) -> Iterator[Piece | Problem]:
    try:
        if "segments" in row:
            yield from _document(None, None, msgspec.convert(row["segments"], list[Segment]), meter)
            return
    except msgspec.ValidationError as error:
        yield Problem(f"{path}, row {number}: {error}")
        return
    for name, value in row.items():
        if not isinstance(value, str):
            yield Problem(f"{path}, row {number}: {_not_text(name, value)}")
            return
    yield from _document(row[fields.text], row.get(fields.prompt or ""), None, meter)


def _document(
    text: str | None, prompt: str | None, segments: Sequence[Segment] | None, meter: Meter
) -> Iterator[Piece]:
    if segments is None and prompt is None and text is not None and len(text) <= PIECE:
        if text:
            yield Piece(text, True, True)
        else:
            meter.empty += 1
        return
    if segments is None:
        segments = [Segment(prompt, loss=False)] if prompt is not None else []
        segments = [*segments, Segment(text or "")]
    if not any(segment.text for segment in segments):
        meter.empty += 1
        return
    for place, segment in enumerate(segments):
        ends, held = place == len(segments) - 1, ""
        for part in in_pieces([segment.text]):
            if held:
                yield Piece(held, segment.loss, False)
            held = part
        if held or ends:
            yield Piece(held, segment.loss, ends)


def _record(fields: Fields) -> type[Any]:
    """A struct of the wanted fields only: the decoder then steps over all others without building them."""
    wanted: list[tuple[str, Any, Any]] = [("text", str | None, None), ("segments", list[Segment] | None, None)]
    rename = {"text": fields.text, "segments": "segments"}
    if fields.prompt:
        wanted.append(("prompt", str | None, None))
        rename["prompt"] = fields.prompt
    # Without a prompt field every record has the same one: none.
    return msgspec.defstruct("Record", wanted, rename=rename, namespace={} if fields.prompt else {"prompt": None})


def _explain(line: bytes, fields: Fields, error: Exception | None) -> str:
    """What is wrong with a record: found slowly, because it is found once."""
    if len(line) > _SHORT:
        return str(error or f"no field {fields.text!r} among the wanted ones")
    try:
        record = msgspec.json.decode(line)
    except RecursionError:
        return "its values are nested too deeply"
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        return f'not JSON: {reason}; a line is one record, for example {{"{fields.text}": "..."}}'
    if not isinstance(record, dict):
        return f'a record is an object like {{"{fields.text}": "..."}}, not {_type(record)}'
    if record.get("segments") is None:
        for name in (fields.text, fields.prompt):
            if name is not None and name not in record:
                return _no_field(name, list(record))
            if name is not None and not isinstance(record[name], str):
                return _not_text(name, record[name])
    return f'{error}; segments look like [{{"text": "...", "loss": false}}, ...]'


def _no_field(name: str, names: Sequence[str]) -> str:
    if not names:
        return f"no field {name!r}: the record is empty"
    return f"no field {name!r} among {', '.join(map(repr, names))}; {did_you_mean(name, names)}"


def _not_text(name: str, value: object) -> str:
    return f"field {name!r} is {_type(value)}; a string is needed"


_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def _type(value: object) -> str:
    return _TYPES.get(type(value), type(value).__name__)
