"""Damage is found and named with its place, before a run or beside it; what was hashed once is known."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fivefold.data import integrity as cache_module
from fivefold.data.batch import read_batch
from fivefold.data.index import CHUNK_BYTES
from fivefold.data.integrity import CheckedData, Checker, findings, verify
from fivefold.data.prepare import prepare
from fivefold.data.shards import TokenShards
from fivefold.data.tokens import TokenStore
from fivefold.generation.request import text_of
from tests.data.test_index import as_before
from tests.refusals import refusal


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of two and a half chunks each."""
    folder = tmp_path_factory.mktemp("large")
    for name in "ab":
        (folder / f"{name}.txt").write_bytes(os.urandom(5 * CHUNK_BYTES // 4))
    prepare([folder], folder / "out", shard_tokens=CHUNK_BYTES)
    return folder / "out"


@pytest.fixture
def store(large: Path, tmp_path: Path) -> Path:
    for file in large.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def settle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files just written count as old."""
    monkeypatch.setattr(cache_module, "_SETTLED_NS", 0)


def test_damage_is_named_with_file_and_chunk(store: Path) -> None:
    assert findings(TokenStore.open(store)) == []
    flip(store / "train-00001.tokens", CHUNK_BYTES + 77)
    (found,) = findings(TokenStore.open(store))
    assert (found.file, found.ranges) == ("train-00001.tokens", [(CHUNK_BYTES, 2 * CHUNK_BYTES)])
    assert f"damaged, within bytes {CHUNK_BYTES} to {2 * CHUNK_BYTES - 1} of" in found.sentence
    flip(store / "train-00001.tokens", 2 * CHUNK_BYTES + 1)  # neighbours are one range
    (found,) = findings(TokenStore.open(store))
    assert found.ranges == [(CHUNK_BYTES, TokenStore.open(store).index.splits["train"][1].token_file.bytes)]


def test_twenty_thousand_flipped_bits_are_found(store: Path) -> None:
    file = store / "train-00000.tokens"
    bits = np.frombuffer(file.read_bytes(), np.uint8).copy()
    places = np.random.default_rng(0).choice(len(bits) // 2, 20_000, replace=False) * 2  # ids stay in the vocabulary
    bits[places] ^= 1
    file.write_bytes(bits.tobytes())
    TokenStore.open(store).check_ids(257)
    error = refusal(lambda: verify(TokenStore.open(store)))
    assert error.codes == ["data.file.damaged"]
    assert "train-00000.tokens is damaged, within bytes 0 to" in str(error)


def test_a_file_that_was_hashed_is_known_until_it_changes(
    store: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path_factory.mktemp("home")
    hashed: list[int] = []

    def hashes() -> int:
        hashed.clear()
        opened = TokenStore.open(store)
        findings(opened, CheckedData(store, home), lambda done, total: hashed.append(total))
        return hashed[0] if hashed else 0

    whole = sum(file.bytes for file in TokenStore.open(store).index.files())
    assert hashes() == hashes() == whole  # files this young could change within a tick of the clock
    settle(store, monkeypatch)
    assert (hashes(), hashes()) == (whole, 0)
    one = store / "train-00000.tokens"
    times = one.stat()
    flip(one, 5)
    os.utime(one, ns=(times.st_atime_ns, times.st_mtime_ns))  # set back: the time of the change is not
    assert hashes() == times.st_size
    (cache,) = (home / "fivefold" / "checked").glob("*.json")
    for text in (b"", b"\xff", b"[" * 100_000, b'{"train-00000.tokens": [1]}'):
        cache.write_bytes(text)
        assert hashes() == whole  # a damaged cache is none, and is made anew
    assert hashes() == times.st_size


def test_a_cache_that_cannot_be_written_is_none(
    store: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path_factory.mktemp("home")
    (home / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(home / "file"))
    assert findings(TokenStore.open(store), CheckedData(store, home / "file")) == []


def test_the_checker_finds_it_beside_the_reading(store: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    flip(store / "train-00001.tokens", 9)
    shares = [
        Checker(TokenStore.open(store), CheckedData(store, tmp_path_factory.mktemp("home")), n, 2) for n in (0, 1)
    ]
    for checker in shares:
        checker.start()
        checker._thread.join()
    assert [found.file for checker in shares for found in checker.findings] == ["train-00001.tokens"]


@pytest.mark.parametrize("sums", [True, False])
def test_the_end_of_a_run_checks_what_was_read(
    store: Path, tmp_path_factory: pytest.TempPathFactory, sums: bool
) -> None:
    """The rest of a large set is left for another time."""
    flip(store / "train-00001.tokens", CHUNK_BYTES + 8)
    if not sums:
        as_before(store)
    opened = TokenStore.open(store)
    first, second = opened.index.splits["train"]
    checker = Checker(opened, CheckedData(store, tmp_path_factory.mktemp("home")))
    opened.split("train").read(0, 1000)
    checker.finish()
    assert checker.findings == []
    at = first.tokens + CHUNK_BYTES // 2
    opened.split("train").read(at, at + 10)
    checker.finish()
    (found,) = checker.findings
    assert found.ranges == [(CHUNK_BYTES, 2 * CHUNK_BYTES) if sums else (0, second.token_file.bytes)]


def test_a_shard_cut_off_in_mid_run_is_a_sentence_and_no_signal(store: Path) -> None:
    split = TokenStore.open(store).split("train")
    read_batch(split, 1000, 0, range(4))
    with (store / "train-00000.tokens").open("r+b") as file:
        file.truncate(4096)
    error = refusal(lambda: split.read(5000, 6000))
    assert error.codes == ["data.file.cut"]
    assert str(error).startswith(f"{store / 'train-00000.tokens'} was cut off while it was read: it ends at byte 4096")


def test_a_shard_replaced_in_mid_run_is_a_sentence(store: Path) -> None:
    split = TokenStore.open(store).split("train")
    split.read(0, 10)
    file = store / "train-00000.tokens"
    times = file.stat()
    flip(file, 4)
    os.utime(file, ns=(0, times.st_mtime_ns + 10**9))
    assert refusal(lambda: split.read(0, 10)).codes == ["data.file.changed"]
    # A renamed one is read as it was as long as it is open, and refused once it is opened again.
    split = TokenStore.open(store).split("train")
    split.read(0, 10)
    (store / "other").write_bytes(file.read_bytes())
    (store / "other").rename(file)
    split.read(0, 10)
    split.store.files._open.clear()
    assert refusal(lambda: split.read(0, 10)).codes == ["data.file.changed"]


def test_a_disk_that_fails_is_a_sentence(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    split = TokenStore.open(store).split("train")
    monkeypatch.setattr(os, "preadv", fail)
    error = refusal(lambda: split.read(100, 200))
    assert error.codes == ["file.read"]
    assert str(error) == f"{store / 'train-00000.tokens'} cannot be read at byte 200: Input/output error"


def test_many_files_are_not_all_open_at_once(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    prepare([jsonl(*({"text": str(n)} for n in range(100)))], tmp_path / "out", shard_tokens=1)
    split = TokenStore.open(tmp_path / "out").split("train")
    split.store.files._most = 16
    before = len(os.listdir("/proc/self/fd"))
    split.read(0, split.tokens)
    assert len(os.listdir("/proc/self/fd")) - before <= 16


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([1, 7, 9], "document 0 (byte 0) begins at token 1"),
        ([0, 7, 7], "document 2 (byte 16) begins at token 7, after one that begins at 7"),
        ([0, -3, 9], "document 1 (byte 8) begins at token -3"),
        ([0, 7, 12], "below 12"),
        ([0, 7, 1 << 62], f"begins at token {1 << 62}"),
    ],
)
def test_documents_rise_from_0_within_their_shard(
    tmp_path: Path, jsonl: Callable[..., Path], values: list[int], sentence: str
) -> None:
    prepare([jsonl({"text": "abcdef"}, {"text": "x"}, {"text": "yz"})], tmp_path / "out")
    file = tmp_path / "out" / "train-00000.documents"
    assert np.frombuffer(file.read_bytes(), "<i8").tolist() == [0, 7, 9]
    file.write_bytes(np.array(values, "<i8").tobytes())
    split = TokenStore.open(tmp_path / "out").split("train")
    assert sentence in str(refusal(lambda: split.read(3, 5)))
    assert refusal(split.store.check_documents).codes == ["data.documents"]


def test_many_documents_are_found_between_marks(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "bc"}\n' * 5000)
    prepare([tmp_path / "in.jsonl"], tmp_path / "out")
    split = TokenStore.open(tmp_path / "out").split("train")
    ordinals = np.repeat(np.arange(10_000), [2, 3] * 5000)
    for start in (0, 1, 5115, 5119, 5120, 12_345, 24_000):
        assert np.array_equal(split.read(start, start + 999).documents, ordinals[start : start + 999])


def test_a_mask_has_two_values(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    prepare([jsonl({"segments": [{"text": "ab", "loss": False}, {"text": "c"}]})], tmp_path / "out")
    (tmp_path / "out" / "train-00000.loss").write_bytes(bytes([0, 0, 3, 1]))
    split = TokenStore.open(tmp_path / "out").split("train")
    error = refusal(lambda: split.read(0, 4))
    assert (error.codes, "byte 2 is 3, " in str(error)) == (["data.mask"], True)


def test_a_damaged_tokenizer_is_not_used(tmp_path: Path, bpe: Path, jsonl: Callable[..., Path]) -> None:
    prepare([jsonl({"text": "a text"})], tmp_path / "out", tokenizer=bpe)
    data = TokenShards(path=str(tmp_path / "out"))
    assert text_of(tmp_path, data, 600).encode("a text")
    flip(tmp_path / "out" / "tokenizer.json", 3000)
    assert "tokenizer.json is damaged" in str(refusal(lambda: text_of(tmp_path, data, 600)))
