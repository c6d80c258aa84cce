"""A small corpus with masked tokens, prepared once."""

import json
from pathlib import Path

import pytest

from fivefold.data.prepare import prepare


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """60 little documents; every second begins with a prompt that carries no loss; a tenth is held out."""
    folder = tmp_path_factory.mktemp("corpus")
    with (folder / "text.jsonl").open("w") as file:
        for number in range(60):
            text = f"def f{number}(x):\n    return x + {number}\n" * (1 + number % 4)
            record: dict[str, object] = {"text": text}
            if number % 2 == 0:
                prompt = {"text": f"# a function that adds {number}\n", "loss": False}
                record = {"segments": [prompt, {"text": text, "loss": True}]}
            file.write(json.dumps(record) + "\n")
    prepare([folder / "text.jsonl"], folder / "tokens", valid=0.1)
    return folder / "tokens"
