"""The faults that docs/faults.md promises to survive, injected into real ranks."""

import os
import re
import resource
import time
from pathlib import Path

import pytest

from fivefold.checkpoint import save
from fivefold.checkpoint.save import write
from fivefold.checkpoint.store import MANIFEST, Store
from fivefold.launch.faults import parse
from fivefold.launch.ranks import RankError
from fivefold.support.errors import UserError
from fivefold.train import checkpointing as checkpointing
from tests.checkpoint.runs import Run, loaded, small_job, train
from tests.ranks import run_ranks


def fault(text: str) -> dict[str, str]:
    return dict(os.environ) | {"FIVEFOLD_FAULT": text}


@pytest.mark.parametrize("at", ["write", "commit"])
def test_killed_while_saving_the_one_before_is_used(tokens: Path, tmp_path: Path, at: str) -> None:
    job = small_job(tokens, "layout=dp=2,zero=1", "train.steps=2", "checkpoint.every=1")
    run_ranks(2, train, job, tmp_path)
    more = small_job(tokens, "layout=dp=2,zero=1", "train.steps=3", "checkpoint.every=1")
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(2, train, more, tmp_path, env=fault(f"kill@at={at},rank=0"))
    assert [one.step for one in Store(tmp_path).complete()] == [2, 1]
    assert [path.name for path in Store(tmp_path).incomplete()] == ["step-00000003"]
    step, _, said = run_ranks(2, loaded, more, tmp_path)[0]
    assert step == 2
    assert said[0] == "step-00000003 was never finished; set aside as step-00000003.incomplete"


def test_killed_while_saving_a_step_again_two_saves_never_mix(tokens: Path, tmp_path: Path) -> None:
    """A run is rolled back by hand and saves step 3 once more, over the leftovers of the first save of it."""
    job = small_job(tokens, "train.steps=3", "checkpoint.every=1", "checkpoint.keep=5")
    want = run_ranks(1, train, job, tmp_path)[0]
    first = Store(tmp_path).complete()[0].path
    before = {file.name: file.read_bytes() for file in first.iterdir()}
    first.rename(tmp_path / "kept")
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(1, train, job, tmp_path, env=fault("kill@at=commit,step=3"))
    assert [one.step for one in Store(tmp_path).complete()] == [2, 1]
    again = run_ranks(1, train, job, tmp_path)[0]
    assert again[1] == want[1]
    assert {file.name: file.read_bytes() for file in (tmp_path / "kept").iterdir()} == before


def test_killed_during_retention_enough_remain(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "train.steps=4", "checkpoint.every=1", "checkpoint.keep=2")
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(1, train, job, tmp_path, env=fault("kill@at=retain"))
    complete = Store(tmp_path).complete()
    assert len(complete) >= 2
    assert all(not one.damage() for one in complete)
    assert run_ranks(1, loaded, job, tmp_path)[0][0] == complete[0].step
    run_ranks(1, train, job, tmp_path)
    assert [one.step for one in Store(tmp_path).complete()] == [4, 3]
    assert not list(tmp_path.glob("*.deleting"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


HARM = {
    "flipped": (flip, "is damaged: its sha256 is"),
    "short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is short"),
    "missing": (lambda file: file.unlink(), "is missing"),
}


@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_a_harmed_file_is_named_and_the_one_before_is_used(tokens: Path, tmp_path: Path, how: str, name: str) -> None:
    job = small_job(tokens, "layout=dp=2,zero=1", "train.steps=2", "checkpoint.every=1")
    run_ranks(2, train, job, tmp_path)
    newest = Store(tmp_path).complete()[0].path
    harm, said = HARM[how]
    harm(newest / name)
    ranks = run_ranks(2, loaded, job, tmp_path)
    assert [step for step, _, _ in ranks] == [1, 1]
    assert said in ranks[0][2][0]
    assert f"{newest.name}/{name}" in ranks[0][2][0]
    assert ranks[0][2][1] == (
        "step-00000002 is not used, and set aside as step-00000002.damaged; the one before it is tried"
    )
    assert (tmp_path / "step-00000002.damaged" / MANIFEST).exists()  # nothing was deleted


def changed(store: Path, old: bytes, new: bytes) -> None:
    for one in Store(store).complete():
        manifest = one.path / MANIFEST
        text = manifest.read_bytes()
        assert old in text
        manifest.write_bytes(text.replace(old, new))


def test_a_number_changed_in_a_manifest_is_damage(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "train.steps=2", "checkpoint.every=1")
    run_ranks(1, train, job, tmp_path)
    newest = Store(tmp_path).complete()[0].path / MANIFEST
    newest.write_bytes(newest.read_bytes().replace(b'"samples": 16', b'"samples": 17'))
    step, _, said = run_ranks(1, loaded, job, tmp_path)[0]
    assert step == 1
    assert "manifest.json is damaged: its numbers are not those that it was sealed with" in said[0]


def test_a_checkpoint_of_another_release_is_refused_and_stays_where_it_is(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "layout=dp=2", "train.steps=1")
    run_ranks(2, train, job, tmp_path)
    changed(tmp_path, b'"version": 1', b'"version": 2')
    with pytest.raises(RankError, match="has version 2 of the format"):
        run_ranks(2, loaded, job, tmp_path)
    assert [one.path.name for one in Store(tmp_path).complete()] == ["step-00000001"]


def test_a_run_of_which_no_checkpoint_is_good_does_not_start_over_by_itself(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "train.steps=1")
    run_ranks(1, train, job, tmp_path)
    flip(Store(tmp_path).complete()[0].path / "__0_0.distcp")
    with pytest.raises(RankError, match=r"none of the 1 checkpoints in .* is good; --fresh starts over"):
        run_ranks(1, loaded, job, tmp_path)


def with_small_files(rank: int, world: int, *arguments: object) -> object:
    """As on a disk that is full after 20 KB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return train(rank, world, *arguments)  # type: ignore[arg-type]


def test_a_full_disk_is_named_with_bytes_and_the_old_checkpoint_is_intact(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "layout=dp=2,zero=1", "train.steps=1")
    run_ranks(2, train, job, tmp_path)
    more = small_job(tokens, "layout=dp=2,zero=1", "train.steps=2")
    with pytest.raises(RankError) as failure:
        run_ranks(2, with_small_files, more, tmp_path)
    said = failure.value.error
    assert "the checkpoint of step 2 was not written: rank 0: File too large" in said
    assert "KiB go into" in said
    assert "are free there, files may have 19.53 KiB; the last good one is step-00000001" in said
    assert [one.step for one in Store(tmp_path).complete()] == [1]
    assert not Store(tmp_path).incomplete()
    assert run_ranks(2, loaded, more, tmp_path)[0][0] == 1


def test_a_disk_that_fills_up_on_the_way_stops_all_ranks_with_the_same_words(tokens: Path, tmp_path: Path) -> None:
    """Whoever notices first does not leave the others to find a closed connection."""
    job = small_job(tokens, "layout=dp=2,zero=1", "train.steps=2000", "checkpoint.every=3")
    with pytest.raises(RankError) as failure:
        run_ranks(2, with_small_files, job, tmp_path, timeout=60)
    for end in failure.value.ends:
        assert "TrainingError: the checkpoint of step 3 was not written: rank 0: File too large" in end.error


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
    assert run_ranks(2, loaded, job, tmp_path)[0][1] == want[0][1]


def test_a_fault_that_is_not_one_is_refused() -> None:
    assert parse("") is None
    assert parse("kill@rank=1,step=4") == ("kill", "step", 1, 4)
    for text in ("die", "kill@rank=x", "kill@at=nowhere", "kill@colour=red"):
        with pytest.raises(UserError, match="is not KIND@rank=R"):
            parse(text)


def mutate_after_save(rank: int, world: int, job, directory: Path) -> dict[str, str]:
    """The state that was saved; it is changed as soon as `save` has returned."""
    run = Run(job, world, directory)
    state = run.state()
    run.keeper.save(1)
    for master in run.trainer.engine.weights.masters.values():
        master.data.fill_(7.0)
    for name in run.trainer.engine.weights.masters:
        for moment in run.trainer.engine.optimizer.kept[name].values():
            moment.fill_(7.0)
    run.keeper.saver.finish()
    return state


def test_what_is_written_is_the_snapshot(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "layout=dp=2,zero=1", "model.hidden=64")
    want = run_ranks(2, mutate_after_save, job, tmp_path)[0]
    assert run_ranks(2, loaded, job, tmp_path)[0][1] == want


def test_steps_that_wait_for_the_disk_say_so_once(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: object) -> Path:
        time.sleep(0.3)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(save, "write", slow)
    monkeypatch.setattr(checkpointing, "_LONG", 0.1)
    run = Run(small_job(tokens, "checkpoint.every=2"), 1, tmp_path)
    run.trainer.run([], checkpointing=run.keeper)
    (said,) = run.said
    found = re.fullmatch(r"step 4 waited 0\.\d s for the disk: .* took 0\.\d s to write; with .*every=(\d+) .*", said)
    assert found is not None, said
    assert int(found[1]) > 2
    assert [one.step for one in Store(tmp_path).complete()] == [6, 4]
