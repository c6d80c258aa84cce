"""Whether prepared tokens are those that a model was trained on. Tokens of another tokenizer are numbers without sense
to it, and training on them destroys what it knows.
"""

from pathlib import Path
from typing import Any

from fivefold.data.index import TOKENIZER, read_index
from fivefold.support.documents import read_json
from fivefold.support.errors import UserError
from fivefold.support.files import digest

_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "model")  # of a tokenizer.json: what makes tokens of a text


def foreign(model: Path, prepared: Path, others: tuple[str, ...] = ()) -> list[str]:
    """Why tokens are not those of the model whose tokenizer.json lies in a directory; nothing where that is not known.

    `others` are files of tokenizers that are not read here: that the model's is not bytes can be told by them.
    """
    own, index = model / TOKENIZER, read_index(prepared)
    if not own.is_file():
        known = next((model / name for name in others if (model / name).is_file()), None)
        if known is None or index.tokenizer_file:
            return []
        return [f"{_has(prepared, index.tokenizer)}, and the model's tokenizer is {known}; {_way(model, convert=True)}"]
    file = index.tokenizer_file
    if file is None:
        return [f"{_has(prepared, index.tokenizer)}, and the model's tokenizer is {own}; {_way(model)}"]
    if file.sha256 == (sum_ := digest(own)) or _makes(own) == _makes(prepared / file.name):
        return []
    name = f"{prepared / file.name} (sha256 {file.sha256[:8]}, {index.vocab:,} ids)"
    return [f"{_has(prepared, name)}, and the model's tokenizer is {own} (sha256 {sum_[:8]}); {_way(model)}"]


def _has(prepared: Path, tokenizer: str) -> str:
    return f"the tokens of {prepared} were made by the tokenizer {tokenizer}"


def _way(model: Path, convert: bool = False) -> str:
    first = f"save it as {TOKENIZER} there (AutoTokenizer's save_pretrained does), and " if convert else ""
    return f"{first}prepare the text anew, with 'fivefold data prepare TEXT -o TOKENS --tokenizer {model}'"


def _makes(path: Path) -> Any:
    """What a tokenizer.json says of how tokens are made, however it is formatted and whoever saved it last."""
    try:
        table = read_json(path)
        parts: dict[str, Any] = {key: _plain(table.get(key)) for key in _PARTS}
        if merges := (parts["model"] or {}).get("merges"):  # "a b", or since tokenizers 0.20 ["a", "b"]
            parts["model"]["merges"] = [one if isinstance(one, str) else " ".join(one) for one in merges]
    except (UserError, AttributeError, TypeError):
        return path  # equal to no other
    return parts


def _plain(value: Any) -> Any:
    """Without what has its default: releases differ in which of these they write."""
    if isinstance(value, dict):
        return {key: _plain(it) for key, it in value.items() if it is not None and it is not False}
    return [_plain(it) for it in value] if isinstance(value, list) else value
