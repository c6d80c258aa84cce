"""`fivefold.trainer` from Python: other processes train, and what they leave comes back."""

import fcntl
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

import fivefold as ff
from fivefold.checkpoint.store import Store
from fivefold.data.prepare import prepare
from fivefold.support.errors import TrainingError
from fivefold.trainer.records import Step
from fivefold.trainer.report import Follower
from fivefold.trainer.result import TrainResult

SMALL = ["model.layers=2", "model.hidden=32", "model.ffn=48", "data.seq=16", "train.batch=4", "train.device=cpu",
         "train.eval_samples=0", "train.log_every=1", "optimizer.schedule=constant"]  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> ff.Job:
    (tmp_path / "text.txt").write_text("The same few words, again and again. " * 200)
    prepare([tmp_path / "text.txt"], tmp_path / "tokens")
    words = [f"data.path={tmp_path}/tokens", f"run.dir={tmp_path}/runs", "train.steps=3", "layout=dp=2"]
    return ff.read_job(None, [*SMALL, *words])


def test_a_run_returns_its_losses_and_its_directory(job: ff.Job, tmp_path: Path) -> None:
    """A new directory, as `fresh` asks for it: that of an earlier run is there."""
    (tmp_path / "runs/run").mkdir(parents=True)
    lines: list[str] = []
    result = ff.train(job, fresh=True, progress=lines.append)
    assert result.directory == tmp_path / "runs" / "run-2"
    assert [step.step for step in result.steps] == [1, 2, 3]
    assert result.losses[-1] < result.losses[0]
    assert any(line.startswith("3 steps in ") for line in lines)
    assert (result.directory / "job.toml").is_file()


def test_each_step_s_record_comes_as_it_is_made_and_a_run_goes_on(job: ff.Job) -> None:
    records: list[Step] = []
    first = ff.train(job, on_record=records.append)
    assert records == first.steps
    further = ff.train(first.directory, ["train.steps=5"], on_record=records.append)
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert further.steps == records
    assert further.directory == first.directory


def test_bad_input_and_a_run_that_breaks_are_errors(job: ff.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ff.UserError, match="tp=3 does not divide"):
        ff.train(None, [*SMALL, "layout=tp=3"])
    with pytest.raises(ff.UserError, match="restarts=-1 must be at least 0"):
        ff.train(job, restarts=-1)
    with pytest.raises(ff.UserError, match="nproc=0 must be at least 1"):
        ff.train(job, nproc=0)
    monkeypatch.setenv("FIVEFOLD_FAULT", "raise@rank=1,step=2")
    with pytest.raises(TrainingError, match=r"rank 1 \(dp 1\) failed with exit code 1 in step 2") as broken:
        ff.train(job)
    assert "RuntimeError: " in str(broken.value)  # what it raised


def test_what_only_ranks_notice_comes_back_as_problems(job: ff.Job) -> None:
    """Somebody trains in the directory of the run: rank 0 sees that, and all ranks end."""
    directory = ff.train(job).directory
    with (directory / "claim").open("a") as claimed:
        fcntl.flock(claimed, fcntl.LOCK_EX)
        with pytest.raises(ff.UserError) as refused:
            ff.train(directory, ["train.steps=4"])
    (problem,) = refused.value.problems
    assert problem.startswith(f"another process is training in {directory}")


def test_a_rank_that_dies_is_named_and_restarted(job: ff.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_FAULT", "kill@rank=1,step=2")
    with pytest.raises(TrainingError, match=r"rank 1 \(dp 1\) was ended by SIGKILL in step 2"):
        ff.train(job, fresh=True)
    records: list[Step] = []
    lines: list[str] = []
    result = ff.train(job, restarts=1, fresh=True, on_record=records.append, progress=lines.append)
    assert [step.step for step in result.steps] == [1, 2, 3]
    assert [record.step for record in records] == [1, 1, 2, 3]  # there was no checkpoint of the first
    assert "rank 1 (dp 1) was ended by SIGKILL in step 2" in lines
    assert "starting again from the last checkpoint: 1 of 1" in lines


def test_one_rank_is_another_process_too_and_can_be_restarted(job: ff.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replace(job, layout=ff.Layout())
    monkeypatch.setenv("FIVEFOLD_FAULT", "kill@step=2")
    assert len(ff.train(alone, restarts=1).losses) == 3


def test_ctrl_c_saves_first_and_leaves_the_handlers_as_they_were(job: ff.Job) -> None:
    long = replace(job, train=replace(job.train, steps=100_000))
    before = signal.getsignal(signal.SIGINT)
    lines: list[str] = []

    def interrupt(record: Step) -> None:
        if record.step == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        ff.train(long, on_record=interrupt, progress=lines.append)
    assert any(line.startswith("stopped by Ctrl-C after step ") for line in lines)
    assert "stopping after this step and its checkpoint; Ctrl-C again ends at once" in lines
    assert Store(Path(job.run.dir, "run/checkpoints")).complete()
    assert signal.getsignal(signal.SIGINT) is before


def test_another_signal_saves_too_and_is_an_error_that_says_so(job: ff.Job) -> None:
    long = replace(job, train=replace(job.train, steps=100_000))

    def terminate(record: Step) -> None:
        if record.step == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(TrainingError, match=r"stopped by SIGTERM after step \d+; its checkpoint is saved"):
        ff.train(long, on_record=terminate)
    assert Store(Path(job.run.dir, "run/checkpoints")).complete()


def test_an_exception_of_a_callback_is_the_callers_and_ends_the_ranks(job: ff.Job) -> None:
    long = replace(job, train=replace(job.train, steps=100_000))
    steps: list[int] = []

    def stumble(record: Step) -> None:
        steps.append(record.step)
        if record.step == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ff.train(long, on_record=stumble)
    assert steps == [1, 2]
    assert TrainResult.read(Path(job.run.dir, "run")).steps[0].step == 1  # what was done is kept


def test_messages_that_are_none_are_left_out(tmp_path: Path) -> None:
    lines: list[str] = []
    follower = Follower(tmp_path / "report", lines.append, lambda record: None)
    with (tmp_path / "report").open("ab") as file:
        file.write(b'{"kind":"printed","line":"1"}\n{"kind":"printed"}\n{"kind":"os.system","line":"ls"}\n{"kin')
        file.flush()
        follower.poll()
        file.write(b'd":"printed","line":"2"}\n')
        file.flush()
        follower.poll()
    assert lines == ["1", "2"]
