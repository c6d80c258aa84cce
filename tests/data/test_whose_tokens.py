"""Tokens belong to a tokenizer by how it makes them, not by how its file is formatted."""

import json
from pathlib import Path

import pytest

from fivefold.data.index import read_index
from fivefold.data.prepare import prepare
from fivefold.data.tokenizer import load_tokenizer, tokenizer_mismatches


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
    assert tokenizer_mismatches(tmp_path, prepared) == []
    assert tokenizer_mismatches(bpe.parent, prepared) == []


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
    (said,) = tokenizer_mismatches(tmp_path, prepared)
    assert f"{prepared / 'tokenizer.json'} (sha256 " in said
    assert f"--tokenizer {tmp_path}" in said


def test_documents_end_with_a_token_that_ends_those_of_the_model(bpe: Path, prepared: Path, tmp_path: Path) -> None:
    end = read_index(prepared).end_of_document
    (tmp_path / "tokenizer.json").write_bytes(bpe.read_bytes())
    settings = tmp_path / "config.json"
    for own in (end, [0, end], 10**6, None):  # beyond the vocabulary, as published files have it, it says nothing
        settings.write_text(json.dumps({"eos_token_id": own}))
        assert tokenizer_mismatches(tmp_path, prepared, settings=("config.json",)) == []
    settings.write_text(json.dumps({"eos_token_id": [end + 1, end + 2]}))
    (said,) = tokenizer_mismatches(tmp_path, prepared, settings=("config.json",))
    assert said.code == "data.tokenizer.end"
    assert f"end with token {end}, and documents of {tmp_path} with {end + 1} or {end + 2}" in said


@pytest.mark.parametrize("named", [str, lambda own: {"content": own}], ids=["text", "table"])
def test_a_model_s_own_end_token_comes_before_usual_names(bpe: Path, tmp_path: Path, named) -> None:
    table = json.loads(bpe.read_text())
    (tmp_path / "tokenizer.json").write_bytes(bpe.read_bytes())
    usual = load_tokenizer(tmp_path).end
    own = next(token for token, number in table["model"]["vocab"].items() if number != usual)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named(own)}))
    assert load_tokenizer(tmp_path).end == table["model"]["vocab"][own]


def test_of_a_model_without_a_tokenizer_nothing_is_said(prepared: Path, tmp_path: Path) -> None:
    assert tokenizer_mismatches(tmp_path, prepared, ("tokenizer.model",)) == []
