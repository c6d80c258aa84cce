"""A command of tests/commands.py is what `python -m` would be, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.commands import fivefold, start

ENDS = {
    "returns": "print('done')",
    "exits with a code": "sys.exit(3)",
    "exits with a negative code": "sys.exit(-3)",
    "exits with a text": "sys.exit('why')",
    "exits with nothing": "sys.exit()",
    "raises": "raise ValueError('no')",
    "is interrupted": "os.kill(os.getpid(), signal.SIGINT)",
    "is told to stop": "os.kill(os.getpid(), signal.SIGTERM)",
    "leaves things to do": "atexit.register(print, 'last'); threading.Thread(target=print, args=['thread']).start()",
    "asks": "print(sys.argv[1:], os.environ['SOME'], os.getcwd(), sys.path[0], sys.stdin.read(), __name__)",
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_a_process_of_its_own_would(tmp_path: Path, end: str) -> None:
    (tmp_path / "probe.py").write_text(f"import atexit, os, signal, sys, threading\n{ENDS[end]}\n")
    env = {"SOME": "thing"}
    plain = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    command = [sys.executable, "-m", "probe", "a b", "-c"]
    real = subprocess.run(command, cwd=tmp_path, env=os.environ | env, input="in", capture_output=True, text=True)
    signal.signal(signal.SIGINT, plain)
    done = fivefold("a b", "-c", module="probe", cwd=tmp_path, env=env, input="in")
    assert (done.returncode, done.stdout) == (real.returncode, real.stdout)
    assert done.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_it_can_be_watched_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text("import os, time; os.fork(); print('here', flush=True); time.sleep(600)")
    with start(module="probe", cwd=tmp_path) as run:
        run.until(lambda: run.stdout.count("here") == 2)
        (child,) = run.children
        assert run.returncode is None
        with pytest.raises(AssertionError, match="still runs after 0 s\nhere"):
            run.wait(0)
    assert run.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{run.pid}").exists()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with start(module="probe", cwd=tmp_path):
        pass  # it is left before it has begun
    with start(module="probe", cwd=tmp_path, before=partial(os._exit, 3)) as gone, pytest.raises(AssertionError):
        gone.until("here")


FORKABLE = """
import threading, torch
from fivefold.launch.supervisor import forkable
only_imported = forkable()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(only_imported, forkable())
"""


def test_commands_fork_their_ranks_though_torch_is_imported(tmp_path: Path) -> None:
    """And a process with threads, as torch starts them in one that uses it, is not forked."""
    (tmp_path / "probe.py").write_text(FORKABLE)
    assert fivefold(module="probe", cwd=tmp_path).stdout == "True False\n"
