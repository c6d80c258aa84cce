"""Text to token ids, a batch at a time: bytes, which need nothing, or a Hugging Face `tokenizers` file."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fivefold.data.documents import TextPiece
from fivefold.data.index import TOKENIZER_FILE, DataIndex, read_index
from fivefold.data.text_sources import Meter
from fivefold.support.errors import Problem, UserError
from fivefold.support.files import digest
from fivefold.support.parsing import path_of, read_json
from fivefold.support.progress import prefetch
from fivefold.support.text import did_you_mean, either

BATCH_CHARACTERS = 4 << 20  # characters at a time: enough work for many cores, little enough to hold three times
BATCH_PIECES = 8192
SETTINGS_FILE = "tokenizer_config.json"
# The names under which published tokenizers keep their end of document, most telling first.
END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "<EOS>", "[EOS]", "<｜end▁of▁sentence｜>")


class Joined(NamedTuple):
    """Encoded texts, one after another."""

    tokens: NDArray[np.generic]  # with the end token after each text that ends a document
    lengths: NDArray[np.int64]  # of each text, its end token included


class Tokenizer(Protocol):
    """What preparing needs of a tokenizer."""

    name: str
    vocab: int  # ids are 0 .. vocab - 1
    end: int  # the end-of-document token
    decode: bool  # whether it needs its text as str
    file: Path | None

    def encode(self, texts: list[str | bytes], ends: list[bool]) -> Callable[[], Joined]:
        """Encode, and return what joins the results: the joining may be done in another thread than the encoding."""


def load_tokenizer(given: str | Path, eos: str | int | None = None) -> Tokenizer:
    """`bytes`, a tokenizer.json, or a directory with one in it."""
    if str(given) == "bytes":
        if eos not in (None, ByteTokenizer.end):
            nothing = f"eos={eos!r} does nothing for bytes, whose end of document is {ByteTokenizer.end}"
            raise UserError(nothing, "prepare.eos.bytes")
        return ByteTokenizer()
    path = path_of(given)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"no tokenizer file at {path}: give the path of a Hugging Face tokenizer.json (nothing is downloaded), "
            'or "bytes"',
            "prepare.tokenizer.missing",
        )
    return FileTokenizer(path, eos)


class ByteTokenizer:
    """A token is a byte; 256 ends a document."""

    name = "bytes"
    vocab = 257
    end = 256
    decode = False
    file: Path | None = None

    def encode(self, texts: list[str | bytes], ends: list[bool]) -> Callable[[], Joined]:
        """One widening copy per text."""
        raw = [text if isinstance(text, bytes) else text.encode() for text in texts]
        lengths = np.fromiter(map(len, raw), np.int64, len(raw)) + np.array(ends, np.int64)
        stops = np.cumsum(lengths)
        # End tokens everywhere first; the texts then cover all but the places that stay ends.
        tokens = np.full(int(lengths.sum()), self.end, np.uint16)
        for text, stop, length in zip(raw, stops.tolist(), lengths.tolist(), strict=True):
            begin = stop - length
            tokens[begin : begin + len(text)] = np.frombuffer(text, np.uint8)
        joined = Joined(tokens, lengths)
        return lambda: joined


class FileTokenizer:
    """A tokenizer.json, run by the Rust library on all cores."""

    decode = True

    def __init__(self, path: Path, eos: str | int | None):
        self.path = path
        self.file: Path | None = path
        self.name = path.name
        self._tokenizer = _read(path)
        names: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        # Not the number of names: published vocabularies have holes.
        self.vocab = max(names.values(), default=-1) + 1
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        self.end = _end(path, eos, names, added, self.vocab)
        self._dtype = np.dtype("<u2" if self.vocab <= 1 << 16 else "<u4")

    def encode(self, texts: list[str | bytes], ends: list[bool]) -> Callable[[], Joined]:
        """No special tokens are added; those that the text itself spells out are recognised, as chat templates need."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return lambda: self._join(encodings, ends)

    def encode_with_places(self, texts: list[str]) -> Iterator[tuple[NDArray[np.generic], NDArray[np.int64]]]:
        """The ids of each text, and the character at which each of them begins."""
        import tokenizers

        # A file's own may move a token's begin behind its spaces, across the border of a turn.
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            ids, begins = encoding.ids, [begin for begin, _ in encoding.offsets]
            yield np.fromiter(ids, self._dtype, len(ids)), np.fromiter(begins, np.int64, len(ids))

    def _join(self, encodings: Sequence[Any], ends: list[bool]) -> Joined:
        # The library hands ids out as Python lists only: some 70 ns a token, on one core while the others encode.
        flat: list[int] = []
        stops = []
        for encoding, ending in zip(encodings, ends, strict=True):
            flat += encoding.ids
            if ending:
                flat.append(self.end)
            stops.append(len(flat))
        lengths = np.array(stops, np.int64)
        lengths[1:] -= lengths[:-1].copy()
        # fromiter knows that the ids are small integers; np.array looks at every one of them first.
        return Joined(np.fromiter(flat, self._dtype, len(flat)), lengths)


def _read(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f'{path} needs the tokenizers library, which is not installed: pip install "fivefold[train]"',
            "install.tokenizers",
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file it cannot parse
        unread = f"{path} is not a tokenizer file that can be read: {error}"
        raise UserError(unread, "prepare.tokenizer.damaged") from error
    # A file may carry the settings of some other use: cut every text at 512 tokens, or fill it up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end(path: Path, eos: str | int | None, names: dict[str, int], added: list[str], vocab: int) -> int:
    if isinstance(eos, int):
        if not 0 <= eos < vocab:
            raise UserError(f"eos={eos} is not an id of {path}, whose ids are 0..{vocab - 1}", "prepare.eos.unknown")
        return eos
    if eos is not None:
        if eos not in names:
            hint = did_you_mean(eos, added or list(END_NAMES))
            raise UserError(f"eos={eos!r} is not a token of {path}; {hint}", "prepare.eos.unknown")
        return names[eos]
    for name in (*_own_end(path.parent), *END_NAMES):
        if name in names:
            return names[name]
    known = f"its special tokens: {', '.join(added[:20])}" if added else "it has no special tokens"
    unusual = f"{path} has no end-of-document token with a usual name; give one with --eos ({known})"
    raise UserError(unusual, "prepare.eos.missing")


def _own_end(directory: Path) -> Iterator[str]:
    """The end token that a Hugging Face model names in its own settings, if there are any."""
    named = tokenizer_settings(directory).get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    if isinstance(named, str):
        yield named


def tokenizer_settings(directory: Path, name: str = SETTINGS_FILE) -> dict[str, Any]:
    """What a model's directory says of its tokenizer, if it does."""
    path = directory / name
    table = read_json(path, float) if path.is_file() else {}  # transformers writes that texts may have 10^30 tokens
    return table if isinstance(table, dict) else {}


def end_tokens(directory: Path, names: Iterable[str]) -> set[int]:
    """The tokens that end a document or an answer, as the first of a model's settings files has them that has any."""
    for file in (directory / name for name in names):
        table = read_json(file) if file.is_file() else None
        eos = table.get("eos_token_id") if isinstance(table, dict) else None
        tokens = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if strange := [token for token in tokens if type(token) is not int]:
            raise UserError(f"{file}: eos_token_id={strange[0]!r} is not a token's number", "hf.eos")
        if tokens:
            return set(tokens)
    return set()


# ---- batches, one ahead of the writer ------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """A batch of tokenized pieces, joined."""

    tokens: NDArray[np.generic]
    lengths: NDArray[np.int64]  # tokens of each piece, its end-of-document token included
    loss: NDArray[np.bool_]  # of each piece
    ends: NDArray[np.bool_]  # whether a piece ends its document
    read: int  # bytes read from disk so far


def encode_stream(stream: Iterator[TextPiece], tokenizer: Tokenizer, meter: Meter) -> Generator[Encoded, None, None]:
    """The batches, read and encoded in a background thread: Rust, zlib and file reads leave the interpreter free
    for joining, hashing and writing the batch before."""

    def step() -> tuple[list[TextPiece], Callable[[], Joined], int]:
        pieces = _take(stream)
        join = tokenizer.encode([piece.text for piece in pieces], [piece.ends for piece in pieces])
        return pieces, join, meter.read()

    with closing(prefetch(repeat(step))) as results:
        for pieces, join, read in results:
            if not pieces:
                return
            loss, ends = [piece.loss for piece in pieces], [piece.ends for piece in pieces]
            yield Encoded(*join(), np.array(loss, bool), np.array(ends, bool), read)


def _take(stream: Iterator[TextPiece]) -> list[TextPiece]:
    pieces: list[TextPiece] = []
    size = 0
    for piece in stream:
        pieces.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS or len(pieces) == BATCH_PIECES:
            break
    return pieces


# ---- whose tokens ---------------------------------------------------------------------------------------------------
# Whether prepared tokens are those that a model was trained on. Tokens of another tokenizer are numbers without sense
# to it, and training on them destroys what it knows.


_TOKENIZER_PARTS = (
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "model",
)  # of a tokenizer.json: what makes tokens of a text


def tokenizer_mismatches(
    model: Path, prepared: Path, others: tuple[str, ...] = (), settings: tuple[str, ...] = ()
) -> list[str]:
    """Why tokens are not from the tokenizer.json in a model's directory; empty if they are, or if it is not known.

    `others` are files of tokenizers that are not read here: that the model's is not bytes can be told by them. The
    model's end tokens are in its `settings` files.
    """
    own, index = model / TOKENIZER_FILE, read_index(prepared)
    if not own.is_file():
        known = next((model / name for name in others if (model / name).is_file()), None)
        if known is None or index.tokenizer_file:
            return []
        return [_other(prepared, index.tokenizer, str(known), _prepare_hint(model, convert=True))]
    file = index.tokenizer_file
    if file is None:
        return [_other(prepared, index.tokenizer, str(own), _prepare_hint(model))]
    if file.sha256 == (sum_ := digest(own)) or _makes(own) == _makes(prepared / file.name):
        return _other_end(model, prepared, index, end_tokens(model, settings))
    name = f"{prepared / file.name} (sha256 {file.sha256[:8]}, {index.vocab:,} ids)"
    return [_other(prepared, name, f"{own} (sha256 {sum_[:8]})", _prepare_hint(model))]


def _other_end(model: Path, prepared: Path, index: DataIndex, own: set[int]) -> list[str]:
    """Why documents end with a token that ends none of the model's."""
    own = {token for token in own if token < index.vocab}  # published files name some that are not in the vocabulary
    if not own or index.end_of_document in own:
        return []
    ends = f"documents of {prepared} end with token {index.end_of_document}, and documents of {model} with"
    ends = f"{ends} {either(sorted(own))}"
    return [Problem("data.tokenizer.end", f"{ends}; {_prepare_hint(model)}, and --eos with that token")]


def _other(prepared: Path, tokenizer: str, of_model: str, way: str) -> Problem:
    made = f"the tokens of {prepared} were made by the tokenizer {tokenizer}"
    return Problem("data.tokenizer", f"{made}, and the model's tokenizer is {of_model}; {way}")


def _prepare_hint(model: Path, *, convert: bool = False) -> str:
    first = f"save it as {TOKENIZER_FILE} there (AutoTokenizer's save_pretrained does), and " if convert else ""
    return f"{first}prepare the text anew, with 'fivefold data prepare TEXT -o TOKENS --tokenizer {model}'"


def _makes(path: Path) -> Any:
    """What a tokenizer.json says of how tokens are made, however it is formatted and whoever saved it last."""
    try:
        table = read_json(path)
        parts: dict[str, Any] = {key: _plain(table.get(key)) for key in _TOKENIZER_PARTS}
        if merges := (parts["model"] or {}).get("merges"):  # "a b", or since tokenizers 0.20 ["a", "b"]
            parts["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    except (UserError, AttributeError, TypeError):
        return path  # equal to no other
    return parts


def _plain(value: Any) -> Any:
    """Without what has its default: releases differ in which of these they write."""
    if isinstance(value, dict):
        return {key: _plain(it) for key, it in value.items() if it is not None and it is not False}
    return [_plain(it) for it in value] if isinstance(value, list) else value
