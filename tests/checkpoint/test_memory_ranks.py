"""Runs that lose their ranks, or a node with all it had, and go on from memory. Real ranks."""

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoint.inspect import list_checkpoints, verify_checkpoints
from fivefold.checkpoint.memory_snapshots import MEMORY_DIR_ENV, STARTS_FILE, existing_id, read_starts
from fivefold.checkpoint.store import Store
from fivefold.job.config import Job
from fivefold.launch.processes import RankError
from fivefold.trainer.records import Step
from tests.checkpoint.runs import Recorder, Run, gathered, small_job
from tests.ranks import run_ranks

EVERY_2 = ["train.steps=10", "checkpoint.every=5", "checkpoint.memory_every=2", "train.timeout=60"]


class Killed(Recorder):
    """SIGKILL to this rank when a step is done, and what was under way is over."""

    def __init__(self, run: Run, step: int):
        super().__init__()
        self.run, self.step = run, step

    def on_step(self, record: Step) -> None:
        super().on_step(record)
        if record.step == self.step:
            self.run.keeper.finish()
            self.run.keeper.memory.finish()
            os.kill(os.getpid(), signal.SIGKILL)


def run(rank: int, world: int, job: Job, directory: Path, places: list[Path], kill: int = 0) -> Any:
    """Where the run began, what it said, its losses and its state; `places` are the nodes' memory, by rank."""
    os.environ[MEMORY_DIR_ENV] = str(places[rank % len(places)])
    mine = Run(job, world, directory / "checkpoints")
    mine.keeper.restore()
    recorder = Killed(mine, kill) if kill else mine.recorder
    if mine.trainer.done < job.train.steps:
        mine.trainer.run([recorder], checkpointing=mine.keeper)
    mine.keeper.close()
    return mine.keeper.resumed_from, mine.said, mine.recorder.losses, mine.state()


def limited(rank: int, world: int, *arguments: Any) -> Any:
    """As in shared memory that is full after 20 KB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return run(rank, world, *arguments)


def lost(job: Job, world: int, directory: Path, places: list[Path], kill: int) -> None:
    directory.mkdir()
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(world, run, job, directory, places, kill)


def test_all_ranks_killed_at_once_go_on_from_memory_bit_for_bit(tokens: Path, tmp_path: Path) -> None:
    """Steps 2, 4, 6, 8 go into memory, and 5 onto disk; all die after step 9. A flipped byte in 8 leaves 6."""
    job, memory = small_job(tokens, "layout=dp=2,zero=1", *EVERY_2), tmp_path / "memory"
    (tmp_path / "want").mkdir()
    want = run_ranks(2, run, job, tmp_path / "want", [memory])
    assert want[0][:2] == ("", [])
    assert not list(memory.iterdir())  # a run that ends well leaves nothing
    lost(job, 2, tmp_path / "got", [memory], kill=9)
    os.environ[MEMORY_DIR_ENV] = str(memory)
    try:
        listed = list_checkpoints(tmp_path / "got").to_dict()
        kept = memory / existing_id(tmp_path / "got")
    finally:
        del os.environ[MEMORY_DIR_ENV]
    assert [row["step"] for row in listed["memory"]] == [6, 8]
    assert [row["step"] for row in listed["checkpoints"]] == [5]
    assert listed["home"] == str(kept)
    assert verify_checkpoints(kept).ok
    shutil.copytree(tmp_path / "got", tmp_path / "again")
    newest = Store(kept).complete()[0].path
    assert isinstance(newest, Path)
    whole = (newest / "rank-1.tensors").read_bytes()
    flipped = bytearray(whole)
    flipped[5] ^= 16
    (newest / "rank-1.tensors").write_bytes(flipped)
    assert not verify_checkpoints(kept).ok
    one = run_ranks(2, run, job, tmp_path / "got", [memory])
    for began, _, losses, state in one:
        assert began == "memory, after step 6 (disk has step 5)"
        assert losses == {step: want[0][2][step] for step in range(7, 11)}
        assert state == want[0][3]
    assert "rank-1.tensors is damaged: its sum (fletcher) is" in one[0][1][0]
    assert one[0][1][1:] == ["skipping step 8 in memory; trying step 6 in memory"]
    # A copy of the directory is another run: it has disk alone.
    began, said, losses, state = run_ranks(2, run, job, tmp_path / "again", [memory])[0]
    assert began == f"{tmp_path / 'again' / 'checkpoints' / 'step-00000005'}, after step 5"
    assert (losses[10], state, said) == (want[0][2][10], want[0][3], [])


def test_a_lost_node_is_read_from_its_copies_by_fewer_ranks_in_another_layout(tokens: Path, tmp_path: Path) -> None:
    """Three nodes with a rank each; the memory of the second is gone with its rank, and two ranks go on."""
    settings = ["train.dtype=float64", "train.batch=6", "checkpoint.every=100", "checkpoint.memory_every=3"]
    job = small_job(tokens, "layout=dp=3,zero=1", "train.steps=6", *settings)
    less = small_job(tokens, "layout=tp=2", "train.steps=6", *settings)
    places = [tmp_path / name for name in "abc"]
    (tmp_path / "want").mkdir()
    want = run_ranks(3, run, job, tmp_path / "want", [tmp_path / "d"])
    lost(job, 3, tmp_path / "got", places, kill=5)
    assert [sorted(path.name for path in place.glob("*/step-*/rank-*")) for place in places] == [
        ["rank-0.tensors", "rank-2.tensors"], ["rank-0.tensors", "rank-1.tensors"], ["rank-1.tensors", "rank-2.tensors"]
    ]  # fmt: skip
    shutil.rmtree(places[1])
    places[1].mkdir(mode=0o700)
    found = run_ranks(2, run, less, tmp_path / "got", [places[0], places[2]])
    for began, said, losses, _ in found:
        assert began == "memory, after step 3 (2 of 3 nodes; disk has none)"
        assert said == []
        assert list(losses) == [4, 5, 6]
        for step, numbers in losses.items():
            assert numbers == pytest.approx(want[0][2][step], rel=1e-9)
    assert gathered([state for *_, state in found]).keys() == gathered([state for *_, state in want]).keys()


def test_starts_that_are_damaged_leave_memory_alone_and_disk_is_taken(tokens: Path, tmp_path: Path) -> None:
    """Without them nobody knows whether a snapshot is of the way that the run went on; and no later start does."""
    job = small_job(tokens, *EVERY_2)
    lost(job, 1, tmp_path / "run", [tmp_path / "m"], kill=9)
    file = tmp_path / "run" / STARTS_FILE
    flipped = bytearray(file.read_bytes())
    flipped[flipped.index(b'"step":0') + len(b'"step":')] ^= 1
    file.write_bytes(flipped)
    began, (sentence,), losses, _ = run_ranks(1, run, job, tmp_path / "run", [tmp_path / "m"])[0]
    assert (began, list(losses)) == (f"{tmp_path}/run/checkpoints/step-00000005, after step 5", [6, 7, 8, 9, 10])
    assert sentence.startswith(f"{file} is damaged: its checksum does not match; snapshots")
    first, last = read_starts(tmp_path / "run")
    assert (first.at, first.step, last.step) == (last.at, -1, 5)


def test_memory_without_room_is_one_note_and_training_goes_on(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "layout=dp=2,zero=1", "train.steps=4", "checkpoint.save=false", "checkpoint.memory_every=1")
    (tmp_path / "run").mkdir()
    for began, (sentence,), losses, _ in run_ranks(2, limited, job, tmp_path / "run", [tmp_path / "memory"]):
        assert (began, list(losses)) == ("", [1, 2, 3, 4])
        assert sentence.startswith("no snapshot was taken into memory after step 1: rank 0: File too large")
        assert sentence.endswith("; training continues, checkpoints still go to disk")


@pytest.mark.slow
def test_killed_while_a_snapshot_is_taken_the_one_before_counts(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "layout=dp=2", *EVERY_2)
    (tmp_path / "run").mkdir()
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(2, run, job, tmp_path / "run", [tmp_path / "m"], env={"FIVEFOLD_FAULT": "kill@at=memory,step=8"})
    began, said, _, _ = run_ranks(2, resumed, job, tmp_path / "run", [tmp_path / "m"])[0]
    assert (began, said) == ("memory, after step 6 (disk has step 5)", [])
    (table,) = (tmp_path / "m").glob("*/step-00000006.*/tensors.json")
    table.write_bytes(table.read_bytes().replace(b"float32", b"float64", 1))
    began, said, losses, _ = run_ranks(2, run, job, tmp_path / "run", [tmp_path / "m"])[0]
    assert (began, list(losses)) == (f"{tmp_path}/run/checkpoints/step-00000005, after step 5", [6, 7, 8, 9, 10])
    assert said == [
        f"{table} is damaged: the manifest promises other bytes", "skipping step 6 in memory; trying disk"
    ]  # fmt: skip


def resumed(rank: int, world: int, job: Job, directory: Path, places: list[Path]) -> Any:
    """Where a run would begin."""
    os.environ[MEMORY_DIR_ENV] = str(places[0])
    mine = Run(job, world, directory / "checkpoints")
    mine.keeper.restore()
    mine.keeper.close()
    return mine.keeper.resumed_from, mine.said, {}, mine.state()


def rolled_back(rank: int, world: int, job: Job, directory: Path, place: Path) -> Any:
    os.environ[MEMORY_DIR_ENV] = str(place)
    mine = Run(job, world, directory / "checkpoints")
    mine.keeper.restore()
    mine.trainer.run([mine.recorder], checkpointing=mine.keeper)
    mine.keeper.close()
    return [(one.step, one.back) for one in mine.trainer.policy.decisions], list(mine.recorder.losses), mine.samples


@pytest.mark.slow
def test_a_rollback_takes_what_memory_has_and_forgets_what_it_undid(tokens: Path, tmp_path: Path) -> None:
    """Disk has nothing; batch 11 is a spike, and at least three steps before it are undone."""
    settings = ["checkpoint.save=false", "checkpoint.memory_every=3", "watch.spike=rollback", "watch.rollback=3"]
    job = small_job(tokens, "layout=dp=2,zero=1", "train.steps=12", "watch.window=8", "optimizer.lr=1e-3", *settings)
    (tmp_path / "run").mkdir()
    env = {"FIVEFOLD_FAULT": "spike@step=11"}
    for decisions, steps, samples in run_ranks(2, rolled_back, job, tmp_path / "run", tmp_path / "m", env=env):
        assert decisions == [(11, 6)]  # not 9, which is less than three steps before
        assert sorted(steps) == list(range(1, 13))
        assert len(samples) == len(set(samples)) == 8 * (11 + 6)  # none comes twice
