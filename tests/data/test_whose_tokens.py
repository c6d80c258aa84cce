"""Tokens belong to a tokenizer by how it makes them, not by how its file is formatted."""

import json
from pathlib import Path

import pytest

from fivefold.data.prepare import prepare
from fivefold.data.tokenizer import foreign


@pytest.fixture
def prepared(bpe: Path, tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("some text " * 20)
    prepare([tmp_path / "text.txt"], tmp_path / "tokens", tokenizer=bpe)
    return tmp_path / "tokens"


def test_the_same_tokenizer_saved_otherwise_is_the_same(bpe: Path, prepared: Path, tmp_path: Path) -> None:
    table = json.loads(bpe.read_text())
    assert table["model"]["merges"]
    table["model"]["merges"] = [one if isinstance(one, str) else " ".join(one) for one in table["model"]["merges"]]
    table |= {"truncation": {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}}
    table["model"]["ignore_merges"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(table, indent=1))
    assert foreign(tmp_path, prepared) == []
    assert foreign(bpe.parent, prepared) == []


@pytest.mark.parametrize("part", ["vocab", "merges", "pre_tokenizer", "added_tokens", "nothing"])
def test_another_way_of_making_tokens_is_named(bpe: Path, prepared: Path, tmp_path: Path, part: str) -> None:
    table = json.loads(bpe.read_text())
    if part == "vocab":
        first, second, *_ = table["model"]["vocab"]
        ids = table["model"]["vocab"]
        ids[first], ids[second] = ids[second], ids[first]
    elif part == "merges":
        table["model"]["merges"].reverse()
    elif part == "pre_tokenizer":
        table["pre_tokenizer"]["add_prefix_space"] = True
    else:
        table["added_tokens"].pop()
    (tmp_path / "tokenizer.json").write_text("{" if part == "nothing" else json.dumps(table))
    (said,) = foreign(tmp_path, prepared)
    assert f"{prepared / 'tokenizer.json'} (sha256 " in said
    assert f"--tokenizer {tmp_path}" in said


def test_of_a_model_without_a_tokenizer_nothing_is_said(prepared: Path, tmp_path: Path) -> None:
    assert foreign(tmp_path, prepared, ("tokenizer.model",)) == []
