"""The corpus that needs no download, and what the best guesses reach on it."""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np
import pytest

from fivefold.data.corpus import entropy, stdlib_corpus, stdlib_files
from fivefold.data.integrity import verify
from fivefold.data.prepare import prepare
from fivefold.data.tokens import TokenStore


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_the_corpus_is_the_standard_library_in_bytes(cache: Path) -> None:
    path = stdlib_corpus(cache)
    assert path.parent == cache / "fivefold" / "corpus"
    store = TokenStore.open(path)
    train, valid = store.split("train"), store.split("valid")
    assert store.vocab == 257
    assert train.tokens > 5_000_000
    assert 0.01 < valid.documents / (train.documents + valid.documents) < 0.1
    files = stdlib_files(Path(argparse.__file__).parent)
    assert train.documents + valid.documents == sum(file.stat().st_size > 0 for file in files)
    assert train.tokens + valid.tokens == sum(size + 1 for file in files if (size := file.stat().st_size))


def test_tests_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "a/test/x.py", "site-packages/p/y.py", "idlelib/z.py", "a/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    assert [str(path.relative_to(tmp_path)) for path in stdlib_files(tmp_path)] == ["a/c.py", "b.py"]


def test_it_is_prepared_once_and_made_again_when_damaged(cache: Path) -> None:
    path = stdlib_corpus(cache)
    index = (path / "index.json").stat()
    assert stdlib_corpus(cache) == path
    assert (path / "index.json").stat().st_mtime_ns == index.st_mtime_ns
    for name, damage in (
        ("index.json", lambda good: b"\xff" * 7 + good[7:]),
        ("train-00000.tokens", lambda good: b"\xff" * 7 + good[7:]),
        ("train-00000.tokens", lambda good: good[:100]),
    ):
        good = (path / name).read_bytes()
        (path / name).write_bytes(damage(good))
        assert stdlib_corpus(cache) == path
        assert (path / name).read_bytes() == good, name
    verify(TokenStore.open(path))


def test_processes_that_ask_at_once_get_the_same_corpus(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from fivefold.data.corpus import stdlib_corpus\n"
        "sys.stdin.readline(); print(stdlib_corpus(pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate(timeout=60) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0], answers
    paths = {out.strip() for out, _ in answers}
    assert len(paths) == 1
    verify(TokenStore.open(paths.pop()))
    assert len(list((tmp_path / "fivefold" / "corpus").iterdir())) == 1  # the losers left nothing behind


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    path = stdlib_corpus(tmp_path / "file")
    assert path.is_relative_to(tmp_path / "tmp")
    TokenStore.open(path)


def test_the_best_guesses_on_the_corpus(cache: Path) -> None:
    train = TokenStore.open(stdlib_corpus(cache)).split("train")
    found = entropy(train)
    assert found.bigram is not None
    assert 3.0 < found.unigram < 3.4
    assert 2.2 < found.bigram < 2.6


def test_entropy_is_what_counting_by_hand_gives(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    rng = np.random.default_rng(1)
    path = jsonl(*({"text": "".join(rng.choice(list("aabc "), 50))} for _ in range(30)))
    prepare([path], tmp_path / "out", shard_tokens=100)
    split = TokenStore.open(tmp_path / "out").split("train")
    ids = split.ids(0, split.tokens).tolist()

    def nats(counts: Counter[object]) -> float:
        total = sum(counts.values())
        return -sum(count / total * log(count / total) for count in counts.values())

    by_hand = nats(Counter(pairwise(ids))) - nats(Counter(ids[:-1]))
    for chunk in (7, 1 << 20):
        assert entropy(split, chunk) == pytest.approx((nats(Counter(ids)), by_hand), abs=1e-12)


def test_entropy_of_pairs_is_not_guessed_for_large_vocabularies(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(5000)} | {"</s>": 5000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    prepare([jsonl({"text": "w1 w2 w3"})], tmp_path / "out", tokenizer=tmp_path / "words.json")
    found = entropy(TokenStore.open(tmp_path / "out").split("train"))
    assert found == (pytest.approx(log(4)), None)


def test_no_module_of_data_imports_torch_or_the_optional_libraries() -> None:
    code = (
        "import sys, importlib, pkgutil, fivefold.data as data\n"
        "for module in pkgutil.iter_modules(data.__path__): importlib.import_module('fivefold.data.' + module.name)\n"
        "print([name for name in ('torch', 'tokenizers', 'pyarrow', 'rich') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
