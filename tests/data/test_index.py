"""An index is what was written, or is refused in a sentence: odd values, odd files, and every flipped bit."""

import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fivefold.data.index import CHUNK_BYTES, UNSEALED_VERSION, DataIndex, is_prepared, read_index
from fivefold.data.prepare import prepare
from fivefold.data.tokens import TokenStore
from fivefold.support.errors import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    records = [{"segments": [{"text": f"{n}", "loss": bool(n % 2)}, {"text": "abc"}]} for n in range(40)]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    prepare([folder / "in.jsonl"], folder / "out", valid=0.2, shard_tokens=100)
    return folder / "out"


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    (tmp_path / "index.json").write_bytes((made / "index.json").read_bytes())
    return tmp_path


def told(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_index(path)
    assert not is_prepared(path)
    return str(caught.value)


def change(path: Path, *keys: Any, to: Any, seal: bool = True) -> None:
    """Set one value, and seal the index anew: as somebody's tool could have written it."""
    table = json.loads((path / "index.json").read_text())
    inner = table
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    if seal:
        with suppress(msgspec.ValidationError, OverflowError):
            table["seal"] = msgspec.convert(table, DataIndex).sealed().seal
    (path / "index.json").write_text(json.dumps(table))


SHARD = ("splits", "train", 0)


@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (("vocab",), 0, "vocab=0"),
        (("vocab",), -5, "vocab=-5"),
        (("vocab",), 10**30, "vocab=10000"),
        (("vocab",), 70_000, "are stored as uint32"),
        (("dtype",), "uint32", "are stored as uint16"),
        (("dtype",), "float8", "Invalid enum value"),
        (("end_of_document",), 257, "end_of_document=257"),
        (("end_of_document",), -1, "end_of_document=-1"),
        (("valid",), 1.5, "valid=1.5"),
        (("seed",), 1 << 63, "seed=9223372036854775808"),
        (("splits",), {}, "no shard of the train split"),
        (("splits", "train"), [], "no shard of the train split"),
        (("splits", "test"), [], "no split 'test'"),
        ((*SHARD, "tokens"), -1, "has -1 tokens"),
        ((*SHARD, "tokens"), 10**40, "does not fit its counts"),
        ((*SHARD, "tokens"), 1.5, "Expected `int`"),
        ((*SHARD, "documents"), 0, "in 0 documents"),
        ((*SHARD, "documents"), 10**6, "at least 1 token"),
        ((*SHARD, "token_file", "bytes"), 1 << 70, "does not fit its counts"),
        ((*SHARD, "token_file", "name"), "../../secret", "'../../secret' where it must have 'train-00000.tokens'"),
        ((*SHARD, "token_file", "name"), "/etc/passwd", "'/etc/passwd' where"),
        ((*SHARD, "token_file", "name"), "train-00001.tokens", "where it must have 'train-00000.tokens'"),
        ((*SHARD, "token_file", "sha256"), "0" * 63, "not 64 hexadecimal digits"),
        ((*SHARD, "token_file", "chunks"), "00", "not one for each"),
        ((*SHARD, "loss_file", "bytes"), 3, "does not fit its counts"),
        ((*SHARD, "extra"), 1, "unknown field"),
    ],
)
def test_odd_values_are_a_sentence_each(copy: Path, keys: tuple[Any, ...], value: Any, sentence: str) -> None:
    change(copy, *keys, to=value)
    assert sentence in told(copy)


def test_values_that_could_be_right_are_sealed(copy: Path) -> None:
    change(copy, "seed", to=7, seal=False)
    assert "checksum does not match" in told(copy)
    change(copy, "seed", to=7)
    assert read_index(copy).seed == 7


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b'{"version": 2, "x": ' + b"[" * 100_000, b"\xff" * 9, b"{}",
                                  b'{"version": 2}', b'{"version": ' + b"9" * 5000 + b"}", b"null"])  # fmt: skip
def test_what_is_no_index_is_a_sentence(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "index.json").write_bytes(text)
    assert str(tmp_path / "index.json") in told(tmp_path)


def test_an_index_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.json")
    assert "it is a FIFO" in told(tmp_path)


@pytest.mark.parametrize("few", [400, pytest.param(0, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_refused_or_changes_nothing(copy: Path, few: int) -> None:
    whole, good = (copy / "index.json").read_bytes(), read_index(copy)
    every = range(8 * len(whole))
    for bit in random.Random(0).sample(every, few) if few else every:
        text = bytearray(whole)
        text[bit // 8] ^= 1 << bit % 8
        (copy / "index.json").write_bytes(text)
        with suppress(UserError):
            assert read_index(copy) == good, f"bit {bit} makes another index"


def as_before(path: Path) -> None:
    """The index as releases wrote it that knew no seal and no sums."""
    table = json.loads((path / "index.json").read_text())
    table["version"] = UNSEALED_VERSION
    del table["seal"]
    for shard in (shard for shards in table["splits"].values() for shard in shards):
        for file in (shard[kind] for kind in ("token_file", "document_file", "loss_file") if shard[kind]):
            del file["chunks"]
    (path / "index.json").write_text(json.dumps(table))


def test_an_index_without_seal_and_sums_is_still_read(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "old")
    as_before(tmp_path / "old")
    split, same = (TokenStore.open(path).split("train") for path in (tmp_path / "old", made))
    assert np.array_equal(split.read(0, split.tokens), same.read(0, same.tokens))


def test_sums_of_chunks_stay_small(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(3 << 21))
    prepare([tmp_path / "a.txt"], tmp_path / "out")
    (shard,) = read_index(tmp_path / "out").splits["train"]
    assert shard.token_file.bytes // CHUNK_BYTES == 3
    assert len(shard.token_file.chunks) == 4 * 8
