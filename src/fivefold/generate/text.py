"""Prompts to tokens and back: bytes, or a tokenizer.json."""

from pathlib import Path

from fivefold.data.corpus import stdlib_corpus
from fivefold.data.index import read_index
from fivefold.data.writing.tokenizer import ByteTokenizer, load_tokenizer
from fivefold.errors import UserError


class Text:
    def __init__(self, file: Path | None):
        """`file`: a tokenizer.json; None: a token is a byte."""
        self.file = file
        if file is None:
            self.vocab, self.end = ByteTokenizer.vocab, ByteTokenizer.end
        else:
            tokenizer = load_tokenizer(file)
            self.vocab, self.end = tokenizer.vocab, tokenizer.end

    def encode(self, text: str) -> list[int]:
        if self.file is None:
            return list(text.encode())
        import tokenizers

        ids: list[int] = tokenizers.Tokenizer.from_file(str(self.file)).encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        ids = [token for token in ids if token != self.end]
        if self.file is None:
            return bytes(token for token in ids if token < 256).decode(errors="replace")
        import tokenizers

        text: str = tokenizers.Tokenizer.from_file(str(self.file)).decode(ids, skip_special_tokens=False)
        return text


def text_of(directory: Path, data: str | None, vocab: int) -> Text:
    """The tokenizer beside the weights, or that of the data that they were trained on; `data` None: of no data."""
    if (directory / "tokenizer.json").is_file():
        return Text(directory / "tokenizer.json")
    if data is not None:
        prepared = Path(data).expanduser() if data else stdlib_corpus()
        index = read_index(prepared)
        return Text(prepared / "tokenizer.json" if index.tokenizer_file else None)
    if vocab == ByteTokenizer.vocab:
        return Text(None)
    raise UserError(
        f"{directory} has no tokenizer.json, and its vocabulary of {vocab} is not that of bytes; put the file there, "
        "or give the prompt as numbers: --tokens 1,2,3"
    )
