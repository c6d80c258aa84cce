"""Spikes and steps that are no numbers, on real ranks: all decide alike, and alike again in another layout."""

import shutil
from pathlib import Path

import pytest

from fivefold.checkpoint.retention import delete_later_than
from fivefold.checkpoint.store import Store
from fivefold.job.config import Job
from fivefold.support.errors import TrainingError
from fivefold.trainer import checkpointing
from fivefold.trainer.records import StepDecision
from fivefold.trainer.result import TrainResult
from fivefold.trainer.spikes import DECISIONS_FILE, KnownDecisions, read_decisions
from fivefold.web.run_files import _log_events
from tests.checkpoint.runs import Run, small_job
from tests.commands import fivefold
from tests.ranks import run_ranks

WATCH = ["train.dtype=float64", "optimizer.schedule=constant", "train.steps=12", "checkpoint.every=2",
         "checkpoint.keep=50", "watch.spike=skip", "watch.nonfinite=rollback", "watch.rollback=3", "watch.window=8",
         "watch.slow=0"]  # fmt: skip
Story = tuple[dict[int, tuple[float, float]], list[int], list[str]]


def story(rank: int, world: int, job: Job, directory: Path) -> Story:
    """Losses by step, the samples that were read, and what was said."""
    directory.mkdir(exist_ok=True)
    run = Run(job, world, directory / "checkpoints")
    policy = run.trainer.policy
    policy.learn(
        run.keeper.control.broadcast_value(read_decisions(directory) if rank == 0 else KnownDecisions(), KnownDecisions)
    )
    policy.say, policy.directory = run.said.append, directory if rank == 0 else None
    run.keeper.restore()
    run.trainer.run([run.recorder], checkpointing=run.keeper)
    return run.recorder.losses, run.samples, run.said


def curve(told: Story) -> list[float]:
    """Without step 6, whose loss is reported as it was."""
    return [loss for step, (loss, _) in sorted(told[0].items()) if step != 6]


def batches(told: Story) -> list[int]:
    return [sample // 8 + 1 for sample in told[1][::8]]


def test_what_was_decided_is_decided_again_in_another_layout(tokens: Path, tmp_path: Path) -> None:
    """A spike is skipped, and a gradient that is no number rolled back. Then the run goes on from before both, on other
    ranks, without the faults; and once more from its start, with nothing but the decisions."""
    job = small_job(tokens, *WATCH, "layout=dp=2,zero=1")
    faults = {"FIVEFOLD_FAULT": "spike@step=6;nan@rank=1,step=10,at=batch"}
    first = run_ranks(2, story, job, tmp_path / "first", env=faults)
    assert first[0][0] == first[1][0]
    assert first[0][2] == first[1][2]  # all ranks decide alike
    skip, rollback = read_decisions(tmp_path / "first").decisions
    assert (skip.step, skip.action, skip.why, skip.first, skip.samples) == (6, "skip", "spike", 40, 48)
    assert skip.loss is not None
    assert skip.usual_loss is not None
    assert skip.loss > 50 * skip.usual_loss
    assert (rollback.step, rollback.action, rollback.why, rollback.loss is None) == (10, "rollback", "nonfinite", False)
    assert (rollback.grad_norm, rollback.back, rollback.back_samples, rollback.samples) == (None, 6, 48, 80)
    assert batches(first[0]) == [*range(1, 11), *range(11, 17)]
    assert [one.step for one in Store(tmp_path / "first/checkpoints").complete()] == [12, 10, 8, 6, 4, 2]
    newest = Store(tmp_path / "first/checkpoints").complete()[0].manifest
    assert (newest.samples, newest.updates) == (128, 11)

    shutil.copytree(tmp_path / "first", tmp_path / "again", symlinks=True)
    delete_later_than(Store(tmp_path / "again/checkpoints"), 4)
    again = run_ranks(2, story, small_job(tokens, *WATCH, "layout=tp=2"), tmp_path / "again")
    assert batches(again[0]) == [5, 6, *range(11, 17)]
    assert curve(again[0]) == pytest.approx(curve(first[0])[4:], rel=1e-9)
    assert read_decisions(tmp_path / "again").decisions == [skip, rollback]

    (tmp_path / "told").mkdir()
    shutil.copy(tmp_path / "first" / DECISIONS_FILE, tmp_path / "told")
    told = story(0, 1, small_job(tokens, *WATCH, "layout=microbatches=2"), tmp_path / "told")
    assert curve(told) == pytest.approx(curve(first[0]), rel=1e-9)
    assert batches(told) == [*range(1, 7), *range(11, 17)]
    unwatched = story(0, 1, small_job(tokens, *WATCH), tmp_path / "unwatched")
    assert curve(unwatched)[5:] != pytest.approx(curve(first[0])[5:], rel=1e-3)  # the proof would notice


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,zero=3", "dp=2,zero=2", "pp=2,microbatches=2", "tp=2,sp"])
def test_a_rollback_brings_back_all_of_the_state(tokens: Path, tmp_path: Path, layout: str) -> None:
    """Against a run that leaves the samples out and never had anything to bring back: to the bit."""
    job = small_job(tokens, *WATCH, f"layout={layout}", "train.dtype=bfloat16")
    first = run_ranks(2, story, job, tmp_path / "first", env={"FIVEFOLD_FAULT": "nan@rank=1,step=10,at=batch"})
    assert read_decisions(tmp_path / "first").decisions[0].back == 6
    (tmp_path / "told").mkdir()
    shutil.copy(tmp_path / "first" / DECISIONS_FILE, tmp_path / "told")
    told = run_ranks(2, story, job, tmp_path / "told")
    assert [one[0] for one in told] == [one[0] for one in first]


def test_a_crash_in_a_rollback_does_not_bring_back_what_it_undid(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision is on the disk, and the checkpoints of the steps that it undoes are still there."""
    job = small_job(tokens, *WATCH)
    monkeypatch.setenv("FIVEFOLD_FAULT", "nan@step=10,at=batch")
    whole = story(0, 1, job, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "delete_later_than", _crash)
        with pytest.raises(RuntimeError, match="crash"):
            story(0, 1, job, tmp_path / "cut")
    assert Store(tmp_path / "cut/checkpoints").complete()[0].step == 8
    rest = story(0, 1, job, tmp_path / "cut")
    assert batches(rest) == list(range(11, 17))
    assert {step: whole[0][step] for step in rest[0]} == rest[0]


def test_memory_is_gone_back_to_where_it_is_nearer(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIVEFOLD_FAULT", "nan@step=10,at=batch")
    monkeypatch.setenv("FIVEFOLD_MEMORY", str(tmp_path / "memory"))
    disk = story(0, 1, small_job(tokens, *WATCH), tmp_path / "disk")
    job = small_job(tokens, *WATCH, "checkpoint.every=100", "checkpoint.memory_every=3")
    memory = story(0, 1, job, tmp_path / "run")
    (decided,) = read_decisions(tmp_path / "run").decisions
    assert (decided.back, decided.samples) == (6, 80)
    assert memory[0] == disk[0]


def _crash(store: Store, step: int) -> None:
    raise RuntimeError("crash")


def test_a_fault_that_comes_back_ends_the_run(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever batch step 10 is made with; and no state is touched by any of it."""
    monkeypatch.setenv("FIVEFOLD_FAULT", "nan@step=10")
    with pytest.raises(TrainingError, match=r"step 10: .* not finite; samples .*; the run ends: steps 10, 10, 10 were"):
        story(0, 1, small_job(tokens, *WATCH), tmp_path)
    assert [one.back for one in read_decisions(tmp_path).decisions] == [6, 6, 6]


def test_without_a_checkpoint_that_is_old_enough_a_rollback_is_a_skip(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIVEFOLD_FAULT", "nan@step=4")
    _, samples, said = story(0, 1, small_job(tokens, *WATCH), tmp_path)
    (decided,) = read_decisions(tmp_path).decisions
    assert (decided.action, decided.back) == ("skip", None)
    assert samples == list(range(96))
    assert said[0] == "step 4: there is no checkpoint of step 0 or before to go back to"
    assert said[1] == str(decided)


def test_a_note_has_the_step_its_numbers_and_its_samples() -> None:
    usual = {"usual_loss": 2.25, "usual_norm": 0.5}
    found = StepDecision(step=9, first=32, samples=36, why="spike", action="skip", loss=9.0, grad_norm=1.0, **usual)
    assert str(found) == (
        "step 9: loss 9, gradient norm 1 (usual are 2.25 and 0.5): a spike; samples 32 to 35; skipped: no update is "
        "made, and the samples are used up"
    )


def test_a_run_shows_what_was_decided_wherever_it_is_looked_at(tmp_path: Path) -> None:
    """The terminal, the files of the run, TensorBoard's, and the page's events of a log with that note."""
    small = ["model.layers=1", "model.hidden=32", "model.ffn=32", "data.seq=16", "train.batch=4", "train.steps=10"]
    words = ["watch.spike=skip", "watch.window=8", "train.eval_samples=0", "run.tensorboard=true", *small]
    done = fivefold("train", *words, cwd=tmp_path, env={"FIVEFOLD_FAULT": "spike@step=6"})
    assert done.returncode == 0, done.stderr
    result = TrainResult.read(tmp_path / "runs/run")
    (decided,) = result.decisions
    assert read_decisions(tmp_path / "runs/run").decisions == [decided]
    assert (decided.step, decided.action, decided.first, decided.samples) == (6, "skip", 20, 24)
    assert [step.step for step in result.steps] == list(range(1, 11))
    assert [step.samples for step in result.steps] == list(range(4, 44, 4))
    assert f"note  {decided}" in done.stdout
    assert str(decided) in " ".join("".join(str(block) for block in result.blocks()).split())
    (board,) = (tmp_path / "runs/run/tensorboard").iterdir()
    assert b"watch/skip" in board.read_bytes()
    log = f"{'=' * 20} 2026-01-01T00:00:00 rank 0 of 1 on here, pid 1\nstep  5/10  loss 1\nnote  {decided}\n"
    (event,) = [one for one in _log_events(log, 0, 0.0) if one.kind == "note"]
    assert (event.step, event.text) == (6, str(decided))
