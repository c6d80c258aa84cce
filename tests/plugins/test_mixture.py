"""A data source from outside the package: pure in the position, proven, planned, trained and resumed in any layout."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import fivefold as ff
from fivefold.data.prepare import prepare
from fivefold.data.rows import TokenRow
from fivefold.data.source_check import check
from fivefold.data.tokens import TokenStore
from fivefold.support.errors import UserError
from tests.commands import fivefold
from tests.plugins.conftest import is_short_and_without_torch
from tests.refusals import refusal
from tests.verifier.cases import slow

PACKAGE, NAME = "mixture", "fivefold_mixture:Mixture"
SMALL = ("data.seq=32", "train.batch=4", "train.dtype=float64", "train.eval_samples=8", "train.device=cpu",
         "model.hidden=32", "model.ffn=48", "model.layers=2", "run.name=mix",
         "optimizer.schedule_steps=40")  # fmt: skip


@pytest.fixture
def mixture(package: Path) -> Path:
    return package


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two directories of prepared tokens, which no two texts share, in several documents."""
    home = tmp_path_factory.mktemp("texts")
    for name, letters in (("web", "abcdefghij"), ("code", "0123456789(=)")):
        rng = np.random.default_rng(len(letters))
        for number in range(15):
            text = "".join(rng.choice(list(letters), 200 + 5 * number))
            (home / f"{name}-{number:02d}.txt").write_text(text)
        prepare(sorted(home.glob(f"{name}-*.txt")), home / name, valid=0.2, shard_tokens=1000)
    return home


@pytest.fixture
def chosen(mixture: Path, texts: Path) -> list[str]:
    return [f"data.source={NAME}", f"data.first_path={texts}/web", f"data.second_path={texts}/code", "data.share=0.3"]


def test_it_is_a_short_package_of_its_own_that_imports_no_torch(mixture: Path) -> None:
    is_short_and_without_torch(mixture, "fivefold_mixture")


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_every_stretch_has_the_shares_and_a_block_is_of_one_text(chosen: list[str], texts: Path, share: float) -> None:
    splits = check(ff.read_job(None, [*chosen, "data.seq=16", f"data.share={share}"]).data)
    row, size = splits.train, 16
    texts_of = [TokenStore.open(texts / name).split("train").read for name in ("web", "code")]
    seconds = passes = 0
    window = row.read(0, row.tokens)
    for number in range(row.tokens // size):
        here = slice(number * size, (number + 1) * size)
        of_second = [chr(token) in "0123456789(=)" for token in window.tokens[here] if token < 256]
        which = int(of_second[0])
        assert set(of_second) == {bool(which)}
        index = seconds if which else number - seconds
        at = index % row.counts[which] * size  # type: ignore[attr-defined]
        passes = max(passes, index // row.counts[which])  # type: ignore[attr-defined]
        assert np.array_equal(window.tokens[here], texts_of[which](at, at + size).tokens)
        seconds += which
        assert abs(seconds - share * (number + 1)) < 1
    assert passes > 0  # the shorter text begins anew
    whole = zip((number + 1 - seconds, seconds), row.counts, strict=True)  # type: ignore[attr-defined]
    assert all(read >= blocks for read, blocks in whole)
    assert set(np.flatnonzero(~window.loss) % size) == {0}  # the first token of a block alone carries no loss
    assert row.loss_tokens(7, 900) == np.count_nonzero(window.loss[7:900])


def read_all(row: TokenRow) -> NDArray[np.int64]:
    return row.read(0, row.tokens).tokens


def test_damaged_bytes_are_of_the_blocks_that_have_them(chosen: list[str]) -> None:
    source = ff.read_job(None, [*chosen, "data.seq=16"]).data
    before = read_all(source.open().train)
    for number in range(2):
        row = source.open().train
        store = row.stores[number]
        file = store.index.splits["train"][1].token_file
        held = (store.path / file.name).read_bytes()
        try:
            (store.path / file.name).write_bytes(held[:100] + bytes([held[100] ^ 1]) + held[101:])
            changed = np.flatnonzero(read_all(row) != before)
        finally:
            (store.path / file.name).write_bytes(held)
        (named,) = row.tokens_in(store, file.name, 100, 101)
        assert named[0] <= changed[0] < named[1]


def test_what_cannot_be_mixed_is_refused_in_a_sentence(chosen: list[str], tmp_path: Path) -> None:
    job = ff.read_job(None, [*chosen, "data.share=1", "data.second_path="])
    assert [problem.code for problem in job.data.problems()] == ["mixture.share", "mixture.path"]
    short = ff.read_job(None, [*chosen, "data.seq=100000"])
    assert refusal(lambda: check(short.data)).codes == ["mixture.short"]
    missing = ff.read_job(None, [*chosen, f"data.first_path={tmp_path}"])
    assert refusal(lambda: check(missing.data)).codes == ["data.index.missing"]


@pytest.mark.parametrize("layout", ["dp=2,cp=2", *slow(["dp=2,tp=2,zero=1", "pp=2,cp=2", "dp=2,cp=2,zero=3"])])
def test_a_layout_computes_what_one_process_computes_in_float64(layout: str, chosen: list[str]) -> None:
    """On batches of the mixture, of which every rank reads its own share."""
    result = ff.verify(layout, [*chosen, "train.batch=4"], steps=2, seq=16)
    assert result.ok, str(result)


def test_a_run_goes_on_in_another_layout_with_the_same_curve(
    chosen: list[str], mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = ff.train(None, [*chosen, *SMALL, "train.steps=4", "run.name=whole"])
    ff.train(None, [*chosen, *SMALL, "train.steps=2", "layout=dp=2,zero=1"])
    resumed = ff.train("runs/mix", ["train.steps=4", "layout=cp=2"])
    assert resumed.losses == pytest.approx(whole.losses, abs=1e-10)
    assert resumed.losses[0] - resumed.losses[-1] > 0.01  # it learns

    # Another share is another data set: a run goes on with it only if its user says so.
    with pytest.raises(UserError, match=r"data.share: 0.3 -> 0.4") as refused:
        ff.train(None, [*chosen, *SMALL, "data.share=0.4", "train.steps=8"])
    assert refused.value.codes == ["run.resume.settings"]

    # To another process the name is one of a file, and its user has to say that it may be imported.
    done = fivefold("train", "runs/mix", "train.steps=7", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"If you trust it: --plugin {NAME}" in done.stderr


def test_it_is_planned_and_what_reads_weights_needs_no_plugin(
    chosen: list[str], mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fivefold("plan", "tiny", "--cluster", "2xCPU", "--batch", "4", *chosen, "-o", "plan.json", cwd=tmp_path,
                    env={"PYTHONPATH": str(mixture)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    ff.train(None, [*chosen, *SMALL, "train.steps=1"])
    for words in (
        ["hf", "export", "runs/mix", "-o", "hf"],
        ["generate", "runs/mix", "--prompt", "def", "--count", "2", "--device", "cpu"],
    ):
        done = fivefold(*words, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)
