"""Prepared tokens are read back exactly, across shards, and every kind of damage is named."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.index import REMEDY
from fivefold.data.integrity import verify
from fivefold.data.prepare import prepare
from fivefold.data.tokens import TokenStore
from fivefold.support.errors import UserError
from tests.refusals import refusal


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenStore, np.ndarray, np.ndarray, np.ndarray]:
    """A store of many small shards, and its tokens, loss and documents computed in plain Python."""
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    tokens, loss, documents, lines = [], [], [], []
    for number in range(60):
        text = "".join(chr(97 + letter) for letter in rng.integers(0, 26, rng.integers(1, 40)))
        carries = bool(rng.integers(2)) if number % 3 == 0 else True
        lines.append(json.dumps({"segments": [{"text": text, "loss": carries}]}))
        tokens += [*text.encode(), 256]
        loss += [carries] * (len(text) + 1)
        documents += [number] * (len(text) + 1)
    (folder / "in.jsonl").write_text("\n".join(lines))
    prepare([folder / "in.jsonl"], folder / "out", shard_tokens=50)
    return TokenStore.open(folder / "out"), np.array(tokens), np.array(loss), np.array(documents)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_window_is_what_was_written(many: tuple[TokenStore, ...], data: st.DataObject) -> None:
    store, tokens, loss, documents = many
    split = store.split("train")
    assert (split.tokens, split.documents) == (len(tokens), 60)
    assert len(store.index.splits["train"]) > 10
    start = data.draw(st.integers(0, split.tokens))
    stop = data.draw(st.integers(start, split.tokens))
    window = split.read(start, stop)
    assert np.array_equal(window.tokens, tokens[start:stop])
    assert np.array_equal(window.loss, loss[start:stop])
    assert np.array_equal(window.documents, documents[start:stop])
    assert np.array_equal(split.ids(start, stop), tokens[start:stop])


def test_a_window_outside_the_split_is_refused(many: tuple[TokenStore, ...]) -> None:
    split = many[0].split("train")
    with pytest.raises(IndexError, match=rf"\[0, {split.tokens + 1}\)"):
        split.read(0, split.tokens + 1)


@pytest.fixture
def store(tmp_path: Path, jsonl: Callable[..., Path]) -> Path:
    path = jsonl(*({"text": "abcdefghi"} for _ in range(40)))
    prepare([path], tmp_path / "out", shard_tokens=100)
    return tmp_path / "out"


def refused(path: Path, action: Callable[[TokenStore], object] = lambda store: None) -> UserError:
    return refusal(lambda: action(TokenStore.open(path)))


def test_short_long_and_missing_files_are_all_named(store: Path) -> None:
    with (store / "train-00001.tokens").open("r+b") as file:
        file.truncate(77)
    (store / "train-00002.tokens").write_bytes(bytes(300))
    (store / "train-00003.documents").unlink()
    error = refused(store)
    assert error.codes == ["data.file.size", "data.file.size", "data.file.missing"]
    assert [sentence.split(",")[0].removeprefix(f"{store}/train-0000") for sentence in error.problems] == [
        "1.tokens is short: 77 bytes", "2.tokens is too long: 300 bytes",
        f"3.documents is missing: the index promises 80 bytes; {REMEDY.split(',')[0]}",
    ]  # fmt: skip


def poke(path: Path, token: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(2 * token)
        file.write(value.to_bytes(2, "little"))


def test_an_id_outside_the_vocabulary_is_named_with_file_and_offset(store: Path) -> None:
    poke(store / "train-00002.tokens", 37, 300)
    sentence = f"{store / 'train-00002.tokens'}: token 37 (byte 74) is id 300, but the vocabulary has 257 ids (0..256)"
    assert sentence in str(refused(store, lambda opened: opened.check_ids(257)))
    # The same sentence from a window that touches it, and silence from one that does not.
    assert sentence in str(refused(store, lambda opened: opened.split("train").read(230, 240)))
    TokenStore.open(store).split("train").read(0, 237)


def test_a_model_of_fewer_ids_than_the_tokens_is_refused(store: Path) -> None:
    for vocab in (105, 256):
        assert refused(store, lambda opened, vocab=vocab: opened.check_ids(vocab)).codes == ["data.ids"]
    TokenStore.open(store).check_ids(257)


def test_verify_finds_a_flipped_bit_that_no_reading_notices(store: Path) -> None:
    reports: list[tuple[int, int]] = []
    verify(TokenStore.open(store), progress=lambda *now: reports.append(now))
    assert reports[-1][0] == reports[-1][1] == 40 * 10 * 2 + 40 * 8
    poke(store / "train-00001.tokens", 3, ord("z"))
    TokenStore.open(store).check_ids(257)
    assert refused(store, verify).codes == ["data.file.damaged"]


def test_an_index_of_another_kind_or_version_is_refused(store: Path, tmp_path: Path) -> None:
    index = json.loads((store / "index.json").read_text())
    (store / "index.json").write_text(json.dumps(index | {"version": 99}))
    assert refused(store).codes == ["data.index.version"]
    (store / "index.json").write_text("{")
    assert refused(store).codes == ["data.index.damaged"]
    assert refused(tmp_path / "nowhere").codes == ["data.index.missing"]


def test_a_split_that_is_not_there_says_why(store: Path) -> None:
    assert refused(store, lambda opened: opened.split("valid")).codes == ["data.split.valid"]
    assert str(refused(store, lambda opened: opened.split("trian"))).endswith("did you mean 'train'?")
