"""Prompts to tokens and back: bytes, or a tokenizer.json."""

from pathlib import Path

from fivefold.checkpoint.find import run_of
from fivefold.checkpoint.store import Checkpoint
from fivefold.data.checking import check_file
from fivefold.data.corpus import stdlib_corpus
from fivefold.data.index import read_index
from fivefold.data.writing.tokenizer import ByteTokenizer, load_tokenizer
from fivefold.job.config import Job
from fivefold.support.errors import UserError
from fivefold.support.places import Place


class Text:
    def __init__(self, file: Path | None):
        """`file`: a tokenizer.json; None: a token is a byte."""
        self.file = file
        if file is None:
            self.end = ByteTokenizer.end
            return
        import tokenizers

        self.end = load_tokenizer(file).end
        self.tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        raw = text.encode("utf-8", "surrogateescape")  # what a shell hands over need not be text
        if self.file is None:
            return list(raw)
        ids: list[int] = self.tokenizer.encode(raw.decode("utf-8", "replace"), add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        ids = [token for token in ids if token != self.end]
        if self.file is None:
            return bytes(token for token in ids if token < 256).decode(errors="replace")
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def text_of_run(checkpoint: Checkpoint, job: Job) -> Text:
    """Of a run; one that was imported and not trained since has no data."""
    return text_of(run_of(checkpoint), job.data.path if checkpoint.manifest.data else None, job.model.vocab)


def text_of(directory: Place, data: str | None, vocab: int) -> Text:
    """The tokenizer in the directory of a run or of Hugging Face's, or that of the data that it was trained on; `data`
    None: of no data."""
    if isinstance(directory, Path) and (directory / "tokenizer.json").is_file():
        return Text(directory / "tokenizer.json")
    if data is not None:
        prepared = Path(data).expanduser() if data else stdlib_corpus()
        file = read_index(prepared).tokenizer_file
        if file and (finding := check_file(prepared, file)):
            raise UserError(finding.sentence)
        return Text(prepared / file.name if file else None)
    if vocab == ByteTokenizer.vocab:
        return Text(None)
    raise UserError(
        f"{directory} has no tokenizer.json, and its vocabulary of {vocab} is not that of bytes; put the file there, "
        "or give the prompt as numbers: --tokens 1,2,3"
    )
