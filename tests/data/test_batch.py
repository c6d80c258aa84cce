"""Batches: inputs, targets one further, masks on targets, documents from 0, and reading ahead."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fivefold.data.batch import read_batch, read_share
from fivefold.data.order import window_of, windows
from fivefold.data.prepare import prepare
from fivefold.data.tokens import Split, TokenStore
from fivefold.support.errors import UserError
from fivefold.support.progress import prefetch
from tests.refusals import refusal


@pytest.fixture
def split(tmp_path: Path, jsonl: Callable[..., Path]) -> Split:
    segments = [{"text": "ask", "loss": False}, {"text": "answer"}]
    path = jsonl(*({"segments": segments} for _ in range(50)), {"text": "x" * 100})
    prepare([path], tmp_path / "out", shard_tokens=37)
    return TokenStore.open(tmp_path / "out").split("train")


def test_a_batch_is_windows_of_the_split(split: Split) -> None:
    seq, seed, samples = 16, 5, [3, 70, 4, 1000]
    batch = read_batch(split, seq, seed, samples)
    assert batch.samples.tolist() == samples
    whole = split.read(0, split.tokens)
    for row, window in enumerate(window_of(np.array(samples), windows(split.tokens, seq), seed)):
        here = slice(window * seq, window * seq + seq)
        after = slice(window * seq + 1, window * seq + seq + 1)
        assert np.array_equal(batch.tokens[row], whole.tokens[here])
        assert np.array_equal(batch.targets[row], whole.tokens[after])
        assert np.array_equal(batch.loss_mask[row], whole.loss[after])
        documents = whole.documents[here]
        assert np.array_equal(batch.documents[row], documents - documents[0])
    assert batch.documents.dtype == np.int32
    assert batch.tokens.shape == batch.targets.shape == batch.loss_mask.shape == (4, seq)
    assert 0 < batch.loss_tokens == batch.loss_mask.sum() < batch.loss_mask.size


def test_the_first_token_of_a_document_keeps_its_loss(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    prepare([jsonl({"text": "ab"}, {"text": "cd"})], tmp_path / "out")
    batch = read_batch(TokenStore.open(tmp_path / "out").split("train"), 5, 0, [0])
    assert batch.tokens.tolist() == [[97, 98, 256, 99, 100]]
    assert batch.targets.tolist() == [[98, 256, 99, 100, 256]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.loss_mask.all()


def test_a_share_is_that_of_the_whole_batch_and_other_tokens_are_not_read(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, read, files = read_batch(split, 8, 1, range(12)), list[str](), split.store.files
    touched = {name: bytes(chunks) for name, chunks in files.touched.items()}
    plain = files.read
    monkeypatch.setattr(files, "read", lambda file, *more: (read.append(file.name), plain(file, *more)))
    files.touched.clear()
    tokens = 0
    for number in range(4):
        share, expected = read_share(split, 8, 1, range(12), 257, 4, number), whole.share(4, number)
        assert share.loss_tokens == whole.loss_tokens == expected.loss_tokens
        assert share.samples.tolist() == list(range(12))
        for name in ("samples", "tokens", "targets", "loss_mask", "documents"):
            assert np.array_equal(getattr(share.mine, name), getattr(expected.mine, name))
        assert files.touched == touched  # what any rank has read, all see to be checked
        tokens += len([name for name in read if name.endswith("tokens")])
        read.clear()
    read_batch(split, 8, 1, range(12))
    assert tokens == len([name for name in read if name.endswith("tokens")])


def test_samples_are_the_same_in_any_batch(split: Split) -> None:
    whole = read_batch(split, 8, 1, range(12))
    for rank in range(3):
        part = read_batch(split, 8, 1, range(rank, 12, 3))
        assert np.array_equal(part.tokens, whole.tokens[rank::3])
    assert read_batch(split, 8, 1, []).tokens.shape == (0, 8)


def test_a_batch_refuses_ids_that_the_model_does_not_have(split: Split) -> None:
    assert refusal(lambda: read_batch(split, 16, 0, range(20), vocab=256)).codes == ["data.ids"]


def test_results_come_in_order_and_one_is_read_ahead() -> None:
    made: list[int] = []
    ready = threading.Event()

    def make(number: int) -> int:
        made.append(number)
        if number == 2:
            ready.set()
        return number * 10

    results = prefetch((lambda n=n: make(n) for n in range(100)), depth=2)
    assert next(results) == 0
    assert ready.wait(5)  # 1 and 2 are made although only 0 was asked for
    time.sleep(0.05)
    assert made == [0, 1, 2]  # and no more than that
    assert list(results) == [n * 10 for n in range(1, 100)]


def test_an_error_arrives_in_its_turn() -> None:
    def broken() -> int:
        raise UserError("a bad shard")

    results = prefetch([lambda: 1, broken, lambda: 3])
    assert next(results) == 1
    with pytest.raises(UserError, match="a bad shard"):
        next(results)


def test_closing_ends_the_thread_and_drops_what_is_not_begun() -> None:
    begun: list[int] = []
    gate = threading.Event()

    def call(number: int) -> None:
        begun.append(number)
        assert number == 0 or gate.wait(5)

    before = threading.active_count()
    results = prefetch((lambda n=n: call(n) for n in range(10**9)), depth=3)
    next(results)
    opener = threading.Timer(0.05, gate.set)  # the call under way is waited for, so it must be able to end
    opener.start()
    results.close()
    opener.join()
    assert threading.active_count() == before
    assert begun in ([0], [0, 1])  # 2 and 3 were waiting, and never ran
