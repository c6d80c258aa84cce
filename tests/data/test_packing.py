"""Whole documents in windows: each lies in one, none reads another, and what does not fit is said."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.data.batch import read_batch, read_share
from fivefold.data.packed_row import PackedRow, best_fit
from fivefold.data.packing import PackedDocuments
from fivefold.data.prepare import prepare
from fivefold.data.shards import TokenShards
from fivefold.data.source_check import check
from fivefold.data.tokens import TokenStore
from fivefold.job.fine_tuning import fine_tuning_job
from fivefold.job.preflight import preflight
from fivefold.job.reading import read_job
from fivefold.job.recipes import Choice
from fivefold.job.toml_writer import commented_toml
from fivefold.spec.presets import preset
from fivefold.support.errors import Note
from tests.data.chat_model import chat_model, turns
from tests.refusals import refusal

Jsonl = Callable[..., Path]
END = 256


@pytest.fixture
def tokens(tmp_path: Path, jsonl: Jsonl) -> Path:
    """Documents of 3 to 41 bytes, their end included; each has its own letter, and loss from its third byte on."""
    sizes = [int(size) for size in np.random.default_rng(0).integers(1, 40, 60)]
    records = [
        {"segments": [{"text": chr(33 + n) * 2, "loss": False}, {"text": chr(33 + n) * (size - 1) or "", "loss": True}]}
        for n, size in enumerate(sizes)
    ]
    prepare([jsonl(*records)], tmp_path / "tokens", shard_tokens=200, valid=0.2)
    return tmp_path / "tokens"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(50, 80))
def test_nothing_overlaps_and_no_window_could_be_joined(lengths: list[int], room: int) -> None:
    falling = sorted(lengths, reverse=True)
    windows, places = best_fit(falling, room)
    used = np.zeros((int(windows.max()) + 1, room), int)
    for length, window, place in zip(falling, windows, places, strict=True):
        used[window, place : place + length] += 1
    assert used.max() == 1
    assert used.sum() == sum(lengths)
    filled = used.sum(1)
    assert sum(filled <= room / 2) <= 1  # two windows half empty would have been one


def test_every_document_lies_whole_in_one_window(tokens: Path) -> None:
    store = TokenStore.open(tokens)
    for name in ("train", "valid"):
        split = store.split(name)
        row = PackedRow(split, 48, cut=True)
        assert (row.documents, row.note) == (split.documents, "")
        whole = split.read(0, split.tokens)
        wanted = sorted(tuple(whole.tokens[whole.documents == n].tolist()) for n in range(split.documents))
        found = []
        for window in range(row.tokens // 48):
            read = row.read(window * 48, window * 48 + 49)
            for number in np.unique(read.documents[:48]):
                here = read.documents[:48] == number
                if number % 2:  # what fills the window
                    assert set(read.tokens[:48][here]) == {END}
                    assert not read.loss[:48][here].any()
                    continue
                found.append(tuple(read.tokens[:48][here].tolist()))
                assert read.loss[:48][here].tolist() == [n > 1 for n in range(here.sum())]
        assert sorted(found) == wanted


def test_it_is_a_source_and_pure_in_the_position(tokens: Path) -> None:
    source = PackedDocuments(path=str(tokens), seq=48)
    splits = check(source)
    row = splits.train
    assert splits.notes == ()
    whole = row.read(0, row.tokens)
    for start, stop in ((0, 1), (5, 90), (47, 49), (row.tokens - 60, row.tokens), (7, 7)):
        part = row.read(start, stop)
        for mine, all_of_it in zip(part, whole, strict=True):
            assert np.array_equal(mine, all_of_it[start:stop])
        assert row.loss_tokens(start, stop) == part.loss.sum()
    batch = read_batch(row, 48, 0, range(4))
    shares = [read_share(row, 48, 0, range(4), row.vocab, 2, number) for number in range(2)]
    assert {share.loss_tokens for share in shares} == {batch.loss_tokens}
    assert source.vocab() == 257
    other = PackedDocuments(path=str(tokens), seq=64)
    assert other.open().fingerprint != splits.fingerprint != PackedDocuments(path=str(tokens), seq=48, long="drop")


def test_what_is_too_long_is_cut_or_left_out_and_that_is_said(tmp_path: Path, jsonl: Jsonl) -> None:
    silent = {"segments": [{"text": "s" * 60, "loss": False}, {"text": "end"}]}
    prepare([jsonl({"text": "a" * 99}, {"text": "b" * 10}, silent)], tmp_path / "tokens")
    cut = PackedDocuments(path=str(tmp_path / "tokens"), seq=50).open()
    assert cut.notes == (
        "2 of the 3 documents of train are longer than data.seq=50, up to 100 tokens: they are cut to their first 50, "
        "and 1 of them left out, as their first 50 carry no loss (data.long=drop leaves out all)",
    )
    counts = np.bincount(cut.train.read(0, cut.train.tokens).tokens)
    assert (counts[ord("a")], counts[ord("b")], counts[ord("s")]) == (50, 10, 0)
    assert cut.train.loss_tokens(0, cut.train.tokens) == 49 + 10  # the first of a document follows nothing of its own
    drop = PackedDocuments(path=str(tmp_path / "tokens"), seq=50, long="drop").open()
    assert drop.notes == (
        "2 of the 3 documents of train are longer than data.seq=50, up to 100 tokens, and are left out "
        "(data.long=drop)",
    )
    assert (drop.train.tokens, drop.train.documents) == (51, 1)
    none = PackedDocuments(path=str(tmp_path / "tokens"), seq=4, long="drop")
    error = refusal(none.open)
    assert (error.codes, str(error).endswith("nearest: data.seq=11")) == (["data.packed.none"], True)


def test_a_command_says_it_without_training(tmp_path: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare([jsonl({"text": "a" * 99}, {"text": "b" * 10})], tmp_path / "tokens")
    monkeypatch.chdir(tmp_path)
    words = ["train", "model=tiny", "data.source=packed", "data.path=tokens", "data.seq=50", "--check"]
    with pytest.warns(Note, match="1 of the 2 documents of train are longer than data.seq=50, up to 100 tokens"):
        assert CliRunner().invoke(app, words).exit_code == 0


def test_an_import_packs_chats_and_nothing_else(tmp_path: Path, jsonl: Jsonl) -> None:
    pytest.importorskip("tokenizers")
    prepare([jsonl(turns("a", "b"))], tmp_path / "chats", tokenizer=chat_model(tmp_path / "model"), chat=True)
    prepare([jsonl({"text": "a" * 200})], tmp_path / "text")
    for name, model, kind in (
        ("chats", "tiny", PackedDocuments),
        ("chats", "tiny-gpt", TokenShards),
        ("text", "tiny", TokenShards),
    ):
        spec, store = preset(model, context=64), TokenStore.open(tmp_path / name)
        job, _ = fine_tuning_job(spec, Choice("float32", ""), store)
        assert (type(job.data), job.data.seq, job.data.prepared()) == (kind, 64, (tmp_path / name,))


def test_an_import_trains_two_epochs_and_no_step_more(tmp_path: Path, jsonl: Jsonl) -> None:
    """64 windows are half a batch, and two epochs of them one step."""
    pytest.importorskip("tokenizers")
    long = turns("why " * 6, "so " * 6)  # over half of a window: one each
    prepare([jsonl(*[long] * 64)], tmp_path / "chats", tokenizer=chat_model(tmp_path / "model"), chat=True)
    store = TokenStore.open(tmp_path / "chats")
    job, _ = fine_tuning_job(preset("tiny", context=64), Choice("float32", ""), store)
    assert (job.train.batch, job.data.open().train.tokens) == (128, 64 * 64 + 1)
    assert job.train.steps == 1


def test_damage_is_said_of_what_has_read_it(tokens: Path) -> None:
    store = TokenStore.open(tokens)
    row = PackedRow(split := store.split("train"), 48, cut=True)
    name = store.index.splits["train"][1].token_file.name
    begin = store.index.splits["train"][0].tokens
    (first, last) = (begin + 3, begin + 9)
    damaged = split.read(first, last).tokens
    parts = row.tokens_in(store, name, 2 * 3, 2 * 9)
    assert sorted(np.concatenate([row.read(*part).tokens for part in parts])) == sorted(damaged)
    row.touch(0, 49)
    assert store.files.touched


def test_a_job_names_it(tokens: Path, tmp_path: Path) -> None:
    words = [
        "model=tiny",
        "model.layers=1",
        "data.source=packed",
        f"data.path={tokens}",
        "data.seq=48",
        "train.batch=2",
    ]
    job = read_job(None, [*words, f"run.dir={tmp_path}", "train.device=cpu"])
    assert job.data.document_mask
    assert preflight(job, 1).train.tokens > 48
    (tmp_path / "job.toml").write_text(commented_toml(job, {}))
    assert read_job(str(tmp_path / "job.toml"), []).data == job.data
    for change, code in {
        "data.path=": "data.packed.path",
        "data.document_mask=false": "data.packed.mask",
        "model=tiny-gpt": "data.packed.positions",
        "data.long=split": "data.long.choice",
    }.items():
        found = refusal(lambda change=change: preflight(read_job(None, [*words, f"run.dir={tmp_path}", change]), 1))
        assert code in found.codes, change
