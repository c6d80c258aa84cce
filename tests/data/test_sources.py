"""Data sources: what a job names, what a source opens, and one sentence for each thing that it lacks."""

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fivefold.data import SOURCES
from fivefold.data.base import DataSource
from fivefold.data.batch import read_batch, read_share
from fivefold.data.order import window_of, windows
from fivefold.data.packing import PackedDocuments
from fivefold.data.rows import Splits, TokenRow, TokenWindow
from fivefold.data.shards import TokenShards
from fivefold.data.source_check import check
from fivefold.job.preflight import preflight
from fivefold.job.reading import read_job
from fivefold.job.toml_writer import to_toml
from fivefold.support import plugins
from fivefold.support.errors import UserError
from tests.refusals import refusal

NAME = "counting_source:Counting"
NUMBERS = count()


class Row(TokenRow):
    """The position modulo a number; each tenth token begins a document, and carries no loss."""

    def __init__(self, vocab: int = 50, tokens: int = 1000):
        self.vocab, self.tokens = vocab, tokens

    def read(self, start: int, stop: int) -> TokenWindow:
        at = np.arange(start, stop)
        return TokenWindow(at % self.vocab, at % 10 != 0, at // 10)


class Counting(DataSource, frozen=True, kw_only=True, tag=NAME):
    ids: int = 50
    text_path: str = ""

    def open(self) -> Splits:
        return Splits(Row(self.ids), None, f"counting {self.ids}", "numbers")


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("counting_source")
    module.Counting = Counting  # type: ignore[attr-defined]
    monkeypatch.setattr(Counting, "__module__", "counting_source")
    monkeypatch.setitem(sys.modules, "counting_source", module)
    monkeypatch.setattr(plugins, "_imported", {})


def opening(row: TokenRow, **more: Any) -> DataSource:
    """A source that opens a row."""

    class Made(DataSource, frozen=True, kw_only=True, tag="made:Made"):
        def open(self) -> Splits:
            return Splits(row, None, "made", **more)

    return Made(seq=16)


def test_prepared_tokens_are_an_entry_of_the_table(tmp_path: Path) -> None:
    assert {"tokens": TokenShards, "packed": PackedDocuments} == SOURCES.table
    assert read_job().data == read_job(None, ["data.source=tokens"]).data == TokenShards()
    assert refusal(lambda: read_job(None, ["data.source=token"])).codes == ["data.source.choice"]


def test_a_job_names_a_source_of_another_module(counting: None, tmp_path: Path) -> None:
    words = [f"data.source={NAME}", "data.ids=40", "data.seq=24", f"run.dir={tmp_path}"]
    job = read_job(None, words)
    assert (type(job.data), job.data.seq, job.data.source) == (Counting, 24, NAME)
    assert job.model.vocab == 257  # of a source without prepared tokens nothing is known before it is opened
    splits = preflight(job, 1)
    assert (splits.train.tokens, splits.where, splits.stores) == (1000, "numbers", [])
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert read_job(tmp_path / "job.toml").data == job.data
    assert refusal(lambda: read_job(None, [*words, "data.idz=3"])).codes == ["setting.unknown"]
    assert refusal(lambda: preflight(read_job(None, [*words, "model.vocab=30"]), 1)).codes == ["data.vocab"]


def test_a_stored_name_keeps_its_settings_and_imports_nothing(counting: None) -> None:
    plugins._imported.clear()
    del sys.modules["counting_source"]
    stored = SOURCES.stored({"source": NAME, "seq": 24, "ids": 40})
    assert (stored.source, stored.seq, stored.ids) == (NAME, 24, 40)
    assert [problem.code for problem in stored.problems()] == ["plugin.untrusted"]
    assert refusal(stored.open).codes == ["plugin.untrusted"]
    assert SOURCES.stored({"path": "old"}) == TokenShards(path="old")  # as the first releases wrote it


def test_a_batch_of_any_source_is_windows_of_its_row() -> None:
    row, samples = Row(), range(3, 11)
    batch = read_batch(row, 24, 7, samples)
    starts = window_of(np.array(samples), windows(row.tokens, 24), 7) * 24
    at = starts[:, None] + np.arange(25)
    assert np.array_equal(batch.tokens, (at % 50)[:, :-1])
    assert np.array_equal(batch.targets, (at % 50)[:, 1:])
    assert np.array_equal(batch.loss_mask, (at % 10 != 0)[:, 1:])
    assert np.array_equal(batch.documents, (at // 10 - at[:, :1] // 10)[:, :-1])
    shares = [read_share(row, 24, 7, samples, 50, 4, number) for number in range(4)]
    assert {share.loss_tokens for share in shares} == {batch.loss_tokens}
    assert np.array_equal(np.concatenate([share.mine.tokens for share in shares]), batch.tokens)


def test_documents_may_have_any_numbers_that_differ() -> None:
    class Other(Row):
        def read(self, start: int, stop: int) -> TokenWindow:
            window = super().read(start, stop)
            return window._replace(documents=7 - window.documents % 2)

    plain, other = (read_batch(row, 24, 7, range(8)).documents for row in (Row(), Other()))
    assert np.array_equal(plain, other)


class Drawn(Row):
    """Other tokens each time."""

    def read(self, start: int, stop: int) -> TokenWindow:
        return super().read(start, stop)._replace(tokens=np.random.default_rng().integers(0, 50, stop - start))


class FromItsStart(Row):
    """Counts from where a reading begins."""

    def read(self, start: int, stop: int) -> TokenWindow:
        return super().read(start, stop)._replace(documents=np.arange(stop - start) // 10)


class Floats(Row):
    def read(self, start: int, stop: int) -> TokenWindow:
        window = super().read(start, stop)
        return TokenWindow(window.tokens.astype(float), window.loss.astype(int), window.documents[1:])


class Pair(Row):
    def read(self, start: int, stop: int) -> Any:
        return 1, 2


class Long(Row):
    def read(self, start: int, stop: int) -> TokenWindow:
        window = super().read(start, stop)
        window.tokens[:] += 1
        return window


class Counted(Row):
    """Counts without reading; `off` is by how far its range is off."""

    def __init__(self, off: int = 0):
        super().__init__()
        self.off = off

    def loss_tokens(self, start: int, stop: int) -> int:
        return sum(at % 10 != 0 for at in range(start + self.off, stop + self.off))


class Seven(Row):
    def loss_tokens(self, start: int, stop: int) -> int:
        return 7


class Broken(Row):
    def read(self, start: int, stop: int) -> TokenWindow:
        raise KeyError("nothing")


@pytest.mark.parametrize(
    ("row", "code", "words"),
    [
        (Drawn(), "data.source.pure", ["train has other tokens at", "is read a second time"]),
        (FromItsStart(), "data.source.pure", ["other documents", "in two pieces, cut at 6"]),
        (Seven(), "data.source.count", ["miscounts train: loss_tokens(1, 17) gave 7, and read gives 15 tokens"]),
        (Counted(1), "data.source.count", ["miscounts train: loss_tokens(", ") gave "]),
        (Counted(-1), "data.source.count", ["miscounts train: loss_tokens(", ") gave "]),
        (Floats(), "data.source.window", ["tokens as 17 values of float64, and not an array of 17 integers",
                                          "loss as 17 values of int64", "documents as 16 values"]),
        (Pair(), "data.source.window", ["Pair.read(0, 17) returned a tuple, and not a TokenWindow"]),
        (Long(), "data.ids", ["Long has the token 50 at 499, and ids are 0 to 49"]),
        (Broken(), "data.source.read", ["Broken.read(0, 17) raised KeyError: 'nothing'"]),
        (TokenRow(), "data.source.opened", ["train with tokens=None", "train with vocab=None", "no method read"]),
        (Row(tokens=0), "data.source.opened", ["train with tokens=0, and not a number of tokens"]),
        (None, "data.source.opened", ["train as a NoneType, and not a fivefold.data.rows:TokenRow"]),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_trained_on_is_refused_before_a_run(row: Any, code: str, words: list[str]) -> None:
    error = refusal(lambda: read_and_check(row))
    assert set(error.codes) == {code}
    for said in words:
        assert said in str(error)


def test_a_source_may_count_without_reading() -> None:
    check(opening(Counted()))


def read_and_check(row: Any) -> None:
    splits = check(opening(row))
    read_batch(splits.train, 16, 0, range(62))  # what only a later window shows


@pytest.mark.parametrize(
    ("opened", "code"),
    [
        (lambda: 3, "data.source.opened"),
        (lambda: Splits(Row(), None, ""), "data.source.opened"),
        (lambda: Splits(Row(), None, str(next(NUMBERS))), "data.source.pure"),
        (lambda: {}["key"], "data.source.open"),
    ],
)
def test_what_a_source_opens_is_held_against_its_protocol(opened: Callable[[], Any], code: str) -> None:
    class Made(DataSource, frozen=True, kw_only=True, tag="made:Made"):
        def open(self) -> Any:
            return opened()

    assert refusal(lambda: check(Made())).codes == [code]


def test_all_that_a_class_lacks_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(DataSource, kw_only=True, tag="half:Whole"):
        size: int

    module = ModuleType("half")
    module.Half = Half  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "half", module)
    monkeypatch.setattr(plugins, "_imported", {})
    with pytest.raises(UserError) as refused:
        read_job(None, ["data.source=half:Half"])
    said = str(refused.value)
    assert set(refused.value.codes) == {"plugin.protocol"}
    for words in ("tag='half:Half'", "settings without a default: size", "no method open(self)"):
        assert words in said
