"""How runs end: signals to stop save a checkpoint, deaths are named with what the process was doing."""

import ctypes
import errno
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fivefold.checkpoint.store import Store
from fivefold.trainer.engine import Engine
from tests.commands import fivefold, start

FAST = ["train.batch=4", "data.seq=16", "train.eval_samples=0", "model.layers=2", "model.hidden=32", "model.ffn=48",
        "train.device=cpu", "optimizer.schedule=constant", "train.log_every=1"]  # fmt: skip
TWO = ["--nproc", "2", "layout=dp=2"]


def words(tokens: Path, *more: str) -> list[str]:
    return ["train", f"data.path={tokens}", *FAST, *more]


def saved(folder: Path) -> list[int]:
    return [one.step for one in Store(folder / "runs/run/checkpoints").complete()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_launcher_has_the_ranks_save_and_one_more_changes_nothing(
    tokens: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with start(*words(tokens, *TWO, "train.steps=100000", "checkpoint.every=0"), cwd=tmp_path) as run:
        run.until("step      3/")
        run.send_signal(number)
        run.send_signal(signal.SIGTERM)
        assert run.wait() == 143
    assert "its checkpoint is saved, and the same command resumes from it" in run.stdout
    (step,) = saved(tmp_path)
    assert f"after step {step};" in run.stdout
    assert run.stderr == ""


@pytest.mark.parametrize("more", [[], TWO])
def test_ctrl_c_saves_first(tokens: Path, tmp_path: Path, more: list[str]) -> None:
    """A terminal sends it to the launcher and its ranks, and the launcher hands it on."""
    with start(*words(tokens, *more, "train.steps=100000", "checkpoint.every=0", "--fresh"), cwd=tmp_path) as run:
        run.until("step      3/")
        ranks = run.children
        os.killpg(run.pid, signal.SIGINT)
        run.until("stopping after this step and its checkpoint; Ctrl-C again ends at once")
        assert run.wait() == 130
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    (step,) = saved(tmp_path)
    done = (
        f"stopped by Ctrl-C after step {step}; its checkpoint is saved, and 'fivefold train runs/run' resumes from it"
    )
    assert done in run.stdout
    assert run.stderr == "stopping after this step and its checkpoint; Ctrl-C again ends at once\n"


@pytest.mark.parametrize("more", [[], TWO])
def test_a_second_ctrl_c_ends_at_once_also_out_of_a_call_that_never_returns(
    tokens: Path, tmp_path: Path, more: list[str]
) -> None:
    with start(*words(tokens, *more, "train.steps=5"), cwd=tmp_path, before=_stuck) as run:
        run.until("stuck")
        os.killpg(run.pid, signal.SIGINT)
        run.until("stopping after this step and its checkpoint; Ctrl-C again ends at once\n")
        code = None
        while code is None:  # a rank says so: a launcher that has yet to hear the first takes both for one
            os.killpg(run.pid, signal.SIGINT)
            with suppress(AssertionError):
                code = run.wait(10)
        assert code == 130
    assert run.stderr.endswith("ended at once; metrics and checkpoints up to here are kept\n")
    assert saved(tmp_path) == []


def _stuck() -> None:
    """The first step does not come back, and Python's own handlers of signals do not run in it."""

    def forward_backward(*_: object) -> None:
        print("stuck", flush=True)
        mutex = ctypes.create_string_buffer(256)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)

    Engine.forward_backward = forward_backward  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("fault", ["usr1@step=3", "hup@step=3"])
def test_a_run_of_one_process_saves_at_a_signal_too(tokens: Path, tmp_path: Path, fault: str) -> None:
    done = fivefold(*words(tokens, "train.steps=5"), cwd=tmp_path, env={"FIVEFOLD_FAULT": fault})
    assert done.returncode == 143, done.stderr
    assert f"stopped by SIG{fault[: fault.index('@')].upper()} after step 3; its checkpoint is saved" in done.stdout
    assert saved(tmp_path) == [3]


@pytest.mark.parametrize("more", [[], TWO])
def test_nohup_is_respected(tokens: Path, tmp_path: Path, more: list[str]) -> None:
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    env = {"FIVEFOLD_FAULT": "hup@step=2"}
    done = fivefold(*words(tokens, *more, "train.steps=3"), cwd=tmp_path, env=env, before=ignore)
    assert done.returncode == 0, done.stderr
    assert saved(tmp_path) == [3]


def test_a_signal_without_a_checkpoint_is_a_failure(tokens: Path, tmp_path: Path) -> None:
    with start(*words(tokens, *TWO, "train.steps=100000", "--restarts", "2"), cwd=tmp_path) as run:
        run.until(lambda: len(run.children) == 2)  # they have only begun
        run.send_signal(signal.SIGTERM)
        run.wait()
    if not saved(tmp_path):  # a quick rank may have come to its first step
        assert run.returncode == 1
        assert "stopped by SIGTERM; no step was saved since" in run.stderr
    assert "starting again" not in run.stderr
    env = {"FIVEFOLD_FAULT": "term@step=2"}
    done = fivefold(*words(tokens, "train.steps=5", "checkpoint.save=false"), cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert "stopped by SIGTERM after step 2; nothing is saved: checkpoint.save=false" in done.stdout


def _no_room(*_: object) -> Path:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _full() -> None:
    Store.new = _no_room  # type: ignore[method-assign]


def test_a_signal_whose_checkpoint_cannot_be_written_is_a_failure(tokens: Path, tmp_path: Path) -> None:
    env = {"FIVEFOLD_FAULT": "term@rank=1,step=2"}
    done = fivefold(*words(tokens, *TWO, "train.steps=5"), cwd=tmp_path, env=env, before=_full)
    assert done.returncode == 1
    assert "the checkpoint of step 2 was not written: rank 0: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_segfault_is_told_with_its_rank_and_its_python_stack(tokens: Path, tmp_path: Path) -> None:
    env = {"FIVEFOLD_FAULT": "segv@rank=1,step=3"}
    done = fivefold(*words(tokens, *TWO, "train.steps=5"), cwd=tmp_path, env=env)
    assert done.returncode == 1
    peer, named, thread, *frames = done.stderr.splitlines()
    assert peer.startswith("error: step 3: rank 0 (dp 0):")
    assert named == "rank 1 (dp 1) was ended by SIGSEGV in step 3"
    assert thread.startswith("Current thread")
    stack = [frame.rpartition(" in ")[2] for frame in frames[:5]]
    assert stack == ["string_at", "_happen", "strike", "_inject_fault", "_step"]
    assert not any("click" in frame or "runpy" in frame for frame in frames)


def test_a_segfault_of_a_process_that_is_not_ours_to_watch_leaves_its_python_stack(
    tokens: Path, tmp_path: Path
) -> None:
    done = fivefold(*words(tokens, "train.steps=5"), cwd=tmp_path, env={"FIVEFOLD_FAULT": "segv"})
    assert done.returncode == -signal.SIGSEGV
    assert "in strike\n" in done.stderr


def test_a_signal_without_a_name_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(f"import os\nos.kill(os.getpid(), {signal.SIGRTMIN + 1})\n")
    (tmp_path / "launching.py").write_text("import sys, fivefold.launch.local as l\nsys.exit(l.launch(2, ['probe']))\n")
    done = fivefold(module="launching", cwd=tmp_path)
    assert done.returncode == 1
    assert f"was ended by signal {signal.SIGRTMIN + 1}" in done.stderr


def test_a_failure_that_comes_twice_in_the_same_step_is_not_tried_again(tokens: Path, tmp_path: Path) -> None:
    for fault in ("raise@rank=1,step=3,starts=9", "segv@rank=0,step=3,starts=9"):
        done = fivefold(
            *words(tokens, *TWO, "train.steps=5", "--restarts", "5", "checkpoint.every=2", "--fresh"),
            cwd=tmp_path, env={"FIVEFOLD_FAULT": fault},
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.count("starting again from the last checkpoint") == 1, done.stderr
        assert done.stderr.endswith("the same failure came twice without progress: it is not tried again\n")


PROBE = """
import os, sys
from fivefold.launch import heartbeat
from fivefold.launch.watchdog import watch
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with watch(60, int(os.environ["RANK"]), 2):
    heartbeat.enter(f"step {sys.argv[1].split(',')[start]}")
    raise ValueError(f"{sys.argv[2].split(',')[start]} at {id(start):#x} after {start}.5 s")
"""


def test_a_failure_after_progress_is_tried_again_and_one_that_comes_twice_is_not(tmp_path: Path) -> None:
    """Whatever addresses and times it has; tests/launch/test_restarts.py has the other cases."""
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "launching.py").write_text(
        "import sys, fivefold.launch.local as l\nsys.exit(l.launch(2, ['probe', *sys.argv[1:]], restarts=3))\n"
    )
    done = fivefold("3,4,4,4", "a,b,b,b", module="launching", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("starting again") == 2
    assert done.stderr.count("it is not tried again") == 1
