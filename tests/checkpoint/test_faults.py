"""The faults that docs/faults.md promises to survive, injected into real ranks."""

import os
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoint import save
from fivefold.checkpoint.manifest import MANIFEST
from fivefold.checkpoint.save import write
from fivefold.checkpoint.store import Store
from fivefold.job.config import Job
from fivefold.launch.processes import RankError
from fivefold.support.errors import TrainingError
from fivefold.trainer import checkpointing
from tests.checkpoint.runs import Run, each, loaded, resealed, small_job, train
from tests.ranks import run_ranks

TWO_STEPS = ["layout=dp=2,zero=1", "train.steps=2", "checkpoint.every=1"]


def fault(text: str) -> dict[str, str]:
    return dict(os.environ) | {"FIVEFOLD_FAULT": text}


@pytest.fixture(scope="module")
def saved(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of two steps of two ranks; for a test to copy."""
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(2, train, small_job(tokens, *TWO_STEPS), directory)
    return directory


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copied")


def steps(directory: Path) -> list[int]:
    return [checkpoint.step for checkpoint in Store(directory).complete()]


@pytest.mark.parametrize("at", ["write", "commit"])
def test_killed_while_saving_the_one_before_is_used(tokens: Path, copied: Path, at: str) -> None:
    more = small_job(tokens, "layout=dp=2,zero=1", "train.steps=3", "checkpoint.every=1")
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(2, train, more, copied, env=fault(f"kill@at={at},rank=0"))
    assert steps(copied) == [2, 1]
    assert [path.name for path in Store(copied).incomplete()] == ["step-00000003"]
    step, _, said = loaded(0, 1, small_job(tokens, "train.steps=3"), copied)
    assert step == 2
    assert said[0] == "step-00000003 was never finished; set aside as step-00000003.incomplete"


def test_killed_while_saving_a_step_again_two_saves_never_mix(tokens: Path, tmp_path: Path) -> None:
    """A run is rolled back by hand and saves step 3 once more, over the leftovers of the first save of it."""
    job = small_job(tokens, "train.steps=3", "checkpoint.every=1", "checkpoint.keep=5")
    want = train(0, 1, job, tmp_path)
    first = Store(tmp_path).complete()[0].path
    before = {file.name: file.read_bytes() for file in first.iterdir()}
    first.rename(tmp_path / "kept")
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(1, train, job, tmp_path, env=fault("kill@at=commit,step=3"))
    assert steps(tmp_path) == [2, 1]
    again = train(0, 1, job, tmp_path)
    assert again[1] == want[1]
    assert {file.name: file.read_bytes() for file in (tmp_path / "kept").iterdir()} == before


def test_killed_during_retention_enough_remain(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "train.steps=4", "checkpoint.every=1", "checkpoint.keep=2")
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(1, train, job, tmp_path, env=fault("kill@at=retain"))
    complete = Store(tmp_path).complete()
    assert len(complete) >= 2
    assert all(not one.damage() for one in complete)
    assert loaded(0, 1, job, tmp_path)[0] == complete[0].step
    train(0, 1, job, tmp_path)
    assert steps(tmp_path) == [4, 3]
    assert not list(tmp_path.glob("*.deleting"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def changed(old: bytes, new: bytes) -> Callable[[Path], object]:
    def change(file: Path) -> None:
        assert old in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(old, new))

    return change


HARM = {
    "flipped": (flip, "is damaged: its sha256 is"),
    "short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is short"),
    "missing": (lambda file: file.unlink(), "is missing"),
}
SEALED = "is damaged: its checksum does not match"
HARMS = {f"{name} {how}": (name, *HARM[how]) for name in ("rank-1.tensors", "tensors.json") for how in HARM} | {
    "another number": (MANIFEST, changed(b'"samples": 16', b'"samples": 17'), SEALED),
    # that was not sealed: it may be of no other release
    "another version": (MANIFEST, changed(b'"version": 2', b'"version": 3'), SEALED),
}


@pytest.fixture(scope="module")
def harmed(tokens: Path, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """Copies of the checkpoints with a harm each, and what every rank has of each after a load."""
    folder, job = tmp_path_factory.mktemp("harmed"), small_job(tokens, *TWO_STEPS)
    for how, (name, harm, _) in HARMS.items():
        harm(Store(shutil.copytree(saved, folder / how)).complete()[0].path / name)
    ranks = run_ranks(2, each, loaded, [(job, folder / how) for how in HARMS])
    return folder, dict(zip(HARMS, zip(*ranks, strict=True), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", HARMS)
def test_a_harmed_file_is_named_and_the_one_before_is_used(harmed: tuple[Path, dict[str, list[Any]]], how: str) -> None:
    (folder, found), (name, _, sentence) = harmed, HARMS[how]
    assert [step for step, _, _ in found[how]] == [1, 1]
    _, _, said = found[how][0]
    assert f"step-00000002/{name} {sentence}" in said[0]
    assert said[1] == ("skipping step-00000002 (set aside as step-00000002.damaged); trying the previous checkpoint")
    assert (folder / how / "step-00000002.damaged" / MANIFEST).exists()  # nothing was deleted


def test_a_checkpoint_of_another_release_is_refused_and_stays_where_it_is(tokens: Path, copied: Path) -> None:
    resealed(Store(copied).complete()[0].path, version=3, colour="red")
    with pytest.raises(RankError, match="has version 3 of the format, and this release reads version 2"):
        run_ranks(2, loaded, small_job(tokens, *TWO_STEPS), copied)
    assert [one.path.name for one in Store(copied).complete()] == ["step-00000002", "step-00000001"]


def test_a_run_of_which_no_checkpoint_is_good_does_not_start_over_by_itself(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "train.steps=1")
    train(0, 1, job, tmp_path)
    flip(Store(tmp_path).complete()[0].path / "rank-0.tensors")
    with pytest.raises(RankError, match=r"none of the 1 checkpoints in .* is good; --fresh starts over"):
        run_ranks(1, loaded, job, tmp_path)


def with_small_files(rank: int, world: int, *arguments: object) -> object:
    """As on a disk that is full after 20 KB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return train(rank, world, *arguments)  # type: ignore[arg-type]


def test_a_full_disk_at_the_end_is_named_with_bytes_and_the_old_checkpoint_is_intact(
    tokens: Path, tmp_path: Path
) -> None:
    job = small_job(tokens, "layout=dp=2,zero=1", "train.steps=1")
    run_ranks(2, train, job, tmp_path)
    more = small_job(tokens, "layout=dp=2,zero=1", "train.steps=2")
    with pytest.raises(RankError) as failure:
        run_ranks(2, with_small_files, more, tmp_path)
    for end in failure.value.ends:  # whoever notices first does not leave the others to find a closed connection
        assert "TrainingError: the checkpoint of step 2 was not written: rank 0: File too large" in end.error
    said = failure.value.error
    assert "KiB go into" in said
    assert "are free there, files may have 19.53 KiB; the last good one is step-00000001" in said
    assert steps(tmp_path) == [1]
    assert not Store(tmp_path).incomplete()
    assert loaded(0, 1, small_job(tokens, "train.steps=2"), tmp_path)[0] == 1


def test_a_save_that_fails_is_told_and_the_next_one_is_another_try(tokens: Path, tmp_path: Path) -> None:
    """Rank 1 alone meets an error in the save of step 2; both go on, and the run is the run that met none."""
    settings = ["layout=dp=2,zero=1", "train.steps=4", "checkpoint.every=1", "checkpoint.keep=9"]
    want = run_ranks(2, told, small_job(tokens, *settings), tmp_path / "want")
    raised = fault("raise@at=write,rank=1,step=2")
    got = run_ranks(2, told, small_job(tokens, *settings), tmp_path / "got", env=raised)
    for (story, said), (wanted, _) in zip(got, want, strict=True):
        assert story == wanted
        (sentence,) = said
        assert sentence.startswith("the checkpoint of step 2 was not written: rank 1: FIVEFOLD_FAULT=raise@at=write")
        assert sentence.endswith(
            "; the last good one is step-00000001; training continues, and the next checkpoint tries again"
        )
    assert steps(tmp_path / "got") == [4, 3, 1]
    assert sorted(path.name for path in (tmp_path / "got").iterdir()) == [
        "latest", "step-00000001", "step-00000003", "step-00000004"
    ]  # fmt: skip
    assert not any(checkpoint.damage() for checkpoint in Store(tmp_path / "got").complete())


def told(rank: int, world: int, job: Job, directory: Path) -> tuple[object, list[str]]:
    run = Run(job, world, directory)
    run.trainer.run([run.recorder], checkpointing=run.keeper)
    return (run.recorder.losses, run.state()), run.said


def test_a_disk_that_has_room_again_gets_the_next_checkpoint(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, real = iter([0, 0, 10**12]), shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=next(free)))
    run = Run(small_job(tokens, "train.steps=3", "checkpoint.every=1"), 1, tmp_path)
    run.trainer.run([], checkpointing=run.keeper)
    assert [re.sub(r"/\S*", "DIR", said) for said in run.said] == [
        f"the checkpoint of step {step} was not written: it takes 374.62 KiB, and DIR has 0 B left; there is none "
        "before it; training continues, and the next checkpoint tries again"
        for step in (1, 2)
    ]
    assert steps(tmp_path) == [3]


def test_a_directory_that_is_gone_is_not_made_again(tokens: Path, tmp_path: Path) -> None:
    run = Run(small_job(tokens, "train.steps=1"), 1, tmp_path / "run" / "checkpoints")
    with pytest.raises(TrainingError, match="the checkpoint of step 1 was not written: No such file or directory"):
        run.trainer.run([], checkpointing=run.keeper)
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_no_number_stops_all_ranks_alike_and_touches_nothing(tokens: Path, tmp_path: Path) -> None:
    same = ["layout=dp=2,zero=1", "optimizer.schedule=constant", "checkpoint.every=1"]
    job = small_job(tokens, *same, "train.steps=4")
    with pytest.raises(RankError) as failure:
        run_ranks(2, train, job, tmp_path, env=fault("nan@rank=1,step=3"))
    ends = failure.value.ends
    assert [end.kind for end in ends] == ["raised", "raised"]
    for end in ends:
        assert "TrainingError: step 3:" in end.error
        assert "samples 16 to 23; the weights were not touched" in end.error
    want = run_ranks(2, train, small_job(tokens, *same, "train.steps=2"), tmp_path / "other")
    assert loaded(0, 1, small_job(tokens, "train.steps=4"), tmp_path)[1] == want[0][1]


def mutate_after_save(rank: int, world: int, job, directory: Path) -> dict[str, str]:
    """The state that was saved; it is changed as soon as `save` has returned."""
    run = Run(job, world, directory)
    state = run.state()
    run.keeper.save(1)
    for master in run.trainer.engine.weights.masters.values():
        master.data.fill_(7.0)
    for name in run.trainer.engine.weights.masters:
        for moment in run.trainer.engine.optimizer.states[name].values():
            moment.fill_(7.0)
    run.keeper.saver.finish()
    return state


def test_what_is_written_is_the_snapshot(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "layout=dp=2,zero=1", "model.hidden=64")
    want = run_ranks(2, mutate_after_save, job, tmp_path)[0]
    assert loaded(0, 1, small_job(tokens, "model.hidden=64"), tmp_path)[1] == want


def test_steps_that_wait_for_the_disk_say_so_once(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, waits = Run(small_job(tokens, "checkpoint.every=2"), 1, tmp_path), threading.Event()
    start, finish = run.keeper.saver.start, run.keeper.saver.finish

    def started(*args: Any) -> Any:
        waits.clear()
        return start(*args)

    def finished() -> str | None:
        waits.set()
        return finish()

    def slow(*args: Any) -> Path:
        """As a disk that is slower than the steps, however slow these are."""
        assert waits.wait(60)
        time.sleep(0.3)
        return write(*args)

    monkeypatch.setattr(run.keeper.saver, "start", started)
    monkeypatch.setattr(run.keeper.saver, "finish", finished)
    monkeypatch.setattr(save, "write", slow)
    monkeypatch.setattr(checkpointing, "_REPORTED_WAIT", 0.1)
    run.trainer.run([], checkpointing=run.keeper)
    (said,) = run.said
    sentence = r"step 4 waited \d+\.\d s for the disk: .* took \d+\.\d s to write; with .*every=(\d+) .*"
    match = re.fullmatch(sentence, said)
    assert match is not None, said
    assert int(match[1]) > 2
    assert steps(tmp_path) == [6, 4]
