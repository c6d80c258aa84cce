"""Damaged data does not train: all ranks end alike, with the file, the place and the steps that read it."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.checkpoint.store import Store
from fivefold.data.integrity import Checker, Finding
from fivefold.data.order import window_of, windows
from fivefold.data.prepare import prepare
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import UserError
from fivefold.trainer import data_guard
from fivefold.trainer.checkpointing import Checkpoints
from fivefold.trainer.data_guard import BadData
from fivefold.trainer.loop import Trainer
from fivefold.trainer.records import Step
from tests.ranks import run_ranks
from tests.trainer.test_loop import Recorder, small_job


@pytest.fixture
def copy(tokens: Path, tmp_path: Path) -> Path:
    shutil.copytree(tokens, tmp_path / "tokens")
    return tmp_path / "tokens"


def flip(path: Path, bits: int) -> None:
    """Ids stay in the vocabulary, so that no reading notices."""
    ids = np.frombuffer(path.read_bytes(), "<u2").copy()
    text = np.flatnonzero(ids < 256)
    ids[np.random.default_rng(0).choice(text, min(bits, len(text)), replace=False)] ^= 1
    path.write_bytes(ids.tobytes())


def test_a_small_set_is_hashed_before_the_first_step(copy: Path) -> None:
    flip(copy / "train-00000.tokens", 20_000)
    with pytest.raises(UserError, match=r"train-00000\.tokens is damaged, within bytes 0 to"):
        preflight(small_job(copy), world=1)


@pytest.fixture
def large(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set that counts as too large to be hashed before the start."""
    monkeypatch.setattr("fivefold.job.preflight.HASHED_FIRST", 0)
    monkeypatch.setattr(data_guard, "HASHED_FIRST", 0)
    return copy


def guarded(job: Job, directory: Path) -> tuple[Trainer, Checkpoints]:
    trainer = Trainer(job, preflight(job, 1), Mesh.of(job.layout, torch.device("cpu")))
    trainer.guard.watch(Control(trainer.mesh), lambda _: None)
    return trainer, Checkpoints(Store(directory), Control(trainer.mesh), trainer, lambda _: None)


def test_damage_found_before_any_step_names_the_step_that_would_read_it(large: Path, tmp_path: Path) -> None:
    flip(large / "train-00000.tokens", 1)
    trainer, keeper = guarded(small_job(large), tmp_path / "checkpoints")
    (checker,) = trainer.guard.checkers.values()
    checker.start()
    checker._thread.join()
    recorder = Recorder()
    with pytest.raises(BadData, match=r"no step has read it, and step 1 would be the first") as caught:
        trainer.run([recorder], checkpointing=keeper)
    assert caught.value.code == 2
    assert str(large / "train-00000.tokens") in str(caught.value)
    assert recorder.steps == []


def test_damage_that_the_thread_does_not_reach_is_found_at_the_end(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checker, "start", lambda self: None)
    flip(large / "train-00000.tokens", 20_000)
    trainer, keeper = guarded(small_job(large, "checkpoint.every=0"), tmp_path / "checkpoints")
    with pytest.raises(BadData, match=r"after step 6: .* steps 1, 2, 3, 4, 5, 6 read it: go back .* before step 1"):
        trainer.run([], checkpointing=keeper)
    assert Store(tmp_path / "checkpoints").complete() == []  # what was trained on it is not kept


def test_what_earlier_starts_have_read_is_checked_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_guard, "HASHED_FIRST", 0)
    monkeypatch.setattr("fivefold.job.preflight.HASHED_FIRST", 0)
    (tmp_path / "in.jsonl").write_text('{"text": "some text to be read"}\n' * 40)
    prepare([tmp_path / "in.jsonl"], tmp_path / "tokens", shard_tokens=100)
    job = small_job(tmp_path / "tokens")
    split = preflight(job, 1).train
    (start,) = window_of(np.arange(1), windows(split.tokens, 24), job.data.seed) * 24
    flip(tmp_path / "tokens" / f"train-{start // 100:05d}.tokens", 1)
    for samples in (0, 1):  # the earlier start was asked to stop after no sample, after sample 0
        trainer, _ = guarded(job, tmp_path / "checkpoints")
        trainer.guard.done = trainer.guard.samples = samples
        trainer.guard.finish()
        assert len(trainer.guard.findings) == samples


class After:
    """Does something after a step."""

    def __init__(self, step: int, act: Any):
        self.step, self.act = step, act

    def on_step(self, record: Step) -> None:
        if record.step == self.step:
            self.act()

    def on_evaluation(self, record: object) -> None: ...

    def close(self) -> None: ...


def test_the_held_out_split_ends_a_run_too_and_its_state_is_kept(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checker, "start", lambda self: None)
    flip(large / "valid-00000.tokens", 5)
    trainer, keeper = guarded(small_job(large, "train.steps=30"), tmp_path / "checkpoints")
    (checker,) = trainer.guard.checkers.values()
    with pytest.raises(BadData, match=r"valid-00000\.tokens is damaged"):
        trainer.run([After(2, lambda: (checker._thread.start(), checker._thread.join()))], checkpointing=keeper)
    (kept,) = Store(tmp_path / "checkpoints").complete()
    assert kept.manifest.step == trainer.done == 2


def test_the_steps_that_read_some_bytes_are_those_of_the_order(copy: Path) -> None:
    job = small_job(copy, "train.batch=3", "data.seq=7")
    sources = preflight(job, 1)
    guard = data_guard.DataGuard(job, sources)
    guard.begin(10, 30)  # a run that was resumed after step 10
    train, samples = sources.train, 1500
    starts = window_of(np.arange(samples), windows(train.tokens, 7), job.data.seed) * 7
    assert samples > 2 * windows(train.tokens, 7)  # in its third epoch
    for first, last in ((0, 1), (700, 721), (699, 700), (701, 740), (train.tokens - 1, train.tokens)):
        found = guard._used(Finding("train-00000.tokens", "", [(2 * first, 2 * last)]), 0, samples)
        reads = np.flatnonzero((starts < last) & (starts + 7 >= first))
        assert found == sorted({int(sample) // 3 + 1 for sample in reads})
    whole = guard._used(Finding("train-00000.documents", "", [(0, 8)]), 0, samples)
    assert whole == list(range(1, 501))
    assert guard._used(Finding("tokenizer.json", "", [(0, 8)]), 0, samples) == []


def lose(
    rank: int, world: int, job: Job, paths: list[Path], name: str, checkpoints: Path
) -> tuple[str, int, list[int]]:
    """Rank 1 reads another directory, one file of which is cut off after step 2."""
    job = small_job(paths[rank], "train.steps=200", "train.eval_every=50", f"layout={job.layout}")
    mesh = Mesh.of(job.layout, torch.device("cpu"))
    trainer, recorder = Trainer(job, preflight(job, world), mesh), Recorder()
    trainer.guard.watch(Control(mesh), lambda _: None)
    keeper = Checkpoints(Store(checkpoints), Control(mesh), trainer, lambda _: None)

    def cut() -> None:
        if rank == 1:
            with (paths[rank] / name).open("r+b") as file:
                file.truncate(100)

    try:
        trainer.run([recorder, After(2, cut)], checkpointing=keeper)
    except BadData as error:
        kept = [one.manifest.step for one in Store(checkpoints).complete()]
        return str(error), len(recorder.steps), kept
    raise AssertionError("the run went on")


@pytest.mark.parametrize(
    ("name", "layout"),
    [("train-00000.tokens", "dp=2"), ("valid-00000.tokens", "pp=2,microbatches=2"), ("train-00000.loss", "cp=2")],
)
def test_what_one_rank_cannot_read_ends_all_of_them_alike(copy: Path, tmp_path: Path, name: str, layout: str) -> None:
    shutil.copytree(copy, tmp_path / "other")
    job = small_job(copy, f"layout={layout}")
    told, same = run_ranks(2, lose, job, [copy, tmp_path / "other"], name, tmp_path / "checkpoints")
    assert told == same
    sentence, steps, kept = told
    assert f"{tmp_path / 'other' / name} was cut off while it was read: it ends at byte 100" in sentence
    assert "rank 1 found it" in sentence
    assert kept == [steps]  # no step was lost: the state before the one that could not be read is saved
