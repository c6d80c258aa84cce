"""Run `fivefold` as a command, from a test, without waiting for its imports:

    def test_a_bad_layout_is_refused(tmp_path):
        done = fivefold("train", "layout=tp=3", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "tp=3 does not divide" in done.stderr

    def test_sigterm_saves(tmp_path):
        with start("train", "train.steps=100000", "--nproc", "2", cwd=tmp_path) as run:
            run.until("step      3/")  # on stdout or stderr; fails if the command ends before
            run.send_signal(signal.SIGTERM)
            assert run.wait() == 143
        assert "stopped by SIGTERM" in run.stdout

A command is `python -m fivefold ...`: a process with its own pid, session, directory, environment, streams and exit
code. It is forked from the server that also forks the ranks of tests/ranks.py, which has imported torch and all modules
of fivefold and has used nothing. The server starts with the first call (seconds) and ends with pytest; a command then
starts in some hundredths of a second. Commands have one thread, and 200 columns unless `env` says otherwise. All have
the server's hash seed.

What a test says of imports, of the time that they take, or of a machine without torch needs a subprocess instead.
"""

import atexit
import gc
import multiprocessing
import os
import pickle
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from fivefold.launch.supervisor import PRELOADED_MODULES

# In a container the only one may be called /dev/nvidia3. A server that has asked CUDA for anything has children that
# cannot use it.
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))


class Command:
    """A command that runs. `stdout` and `stderr` are what it and its ranks have printed up to now."""

    def __init__(self, process: Any, out: IO[bytes], err: IO[bytes]):
        self._process, self._out, self._err = process, out, err
        self.pid: int = process.pid

    @property
    def stdout(self) -> str:
        return _text(self._out)

    @property
    def stderr(self) -> str:
        return _text(self._err)

    @property
    def returncode(self) -> int | None:
        """-N after signal N."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float = 120.0) -> int:
        """The exit code. One that runs longer fails the test."""
        self._process.join(timeout)
        code = self.returncode
        assert code is not None, f"the command still runs after {timeout:.0f} s\n{self.stdout}\n{self.stderr}"
        return code

    def until(self, sign: str | Callable[[], object], timeout: float = 120.0) -> None:
        """Wait until it has printed `sign`, or until `sign()` is true. One that ends before fails the test."""
        seen = (lambda: sign in self.stdout or sign in self.stderr) if isinstance(sign, str) else sign
        deadline = time.monotonic() + timeout
        while not seen():
            over = self.returncode is not None or time.monotonic() > deadline
            assert not over or seen(), f"no {sign!r}\n{self.stdout}\n{self.stderr}"  # what it did last counts
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    @property
    def children(self) -> list[int]:
        """The pids of the ranks that it has forked."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""
        self.send_signal(signal.SIGKILL)  # it may not lead its group yet
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def fivefold(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    timeout: float = 120.0,
    module: str = "fivefold",
    before: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """What `fivefold WORDS` returned and printed. The arguments are those of `start`."""
    with start(*words, cwd=cwd, env=env, input=input, module=module, before=before) as run:
        return subprocess.CompletedProcess([module, *words], run.wait(timeout), run.stdout, run.stderr)


def start(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    module: str = "fivefold",
    before: Callable[[], object] | None = None,
) -> Command:
    """`python -m MODULE WORDS`, `module` being fivefold; or the path of a script. `env` is added to this process's
    variables, and `input` is its standard input. `before` is called in the process first: a function that can be
    pickled, for example `functools.partial(resource.setrlimit, ...)`."""
    whole = {**os.environ, "COLUMNS": "200", **(env or {}), "OMP_NUM_THREADS": "1"}
    stdin, out, err = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115 - open as long as they are asked for
    stdin.write(input.encode())
    stdin.seek(0)
    call = module, [str(word) for word in words], str(cwd or Path.cwd()), whole, before
    return Command(fork(*call, streams=(stdin, out, err)), out, err)


def here(*words: object) -> str:
    """What a command prints that starts no ranks: in this process, in its directory. A refusal is raised."""
    from typer.testing import CliRunner

    from fivefold.cli import app

    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def fork(
    module: str,
    words: list[str],
    cwd: str,
    env: dict[str, str],
    before: Callable[[], object] | None,
    streams: Sequence[IO[Any]],
) -> Any:
    """A process of the server's that `_become`s a command."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    process = context.Process(target=_become, args=(module, words, cwd, env, pickle.dumps(before), _Streams(*streams)))
    process.start()
    return process


def interpreter(preload: list[str] = PRELOADED_MODULES) -> str:
    """What to call with an interpreter's arguments instead of one: the server forks the process. `preload` is what it
    imports, if it does not run yet."""
    forkserver.set_forkserver_preload(preload)
    forkserver.ensure_running()
    address = vars(forkserver._forkserver)["_forkserver_address"]
    return shlex.join([sys.executable, str(Path(__file__).with_name("worker.py")), address])


def executable(folder: Path) -> str:
    """The same as a file, to be sys.executable."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nexec {interpreter()} "$@"\n')
    file.chmod(0o755)
    return str(file)


class _Streams:
    """Open files, on their way to a process."""

    def __init__(self, *files: IO[Any]):
        self._files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([DupFd(file.fileno()) for file in self._files],)


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


def _become(module: str, words: list[str], cwd: str, env: dict[str, str], before: bytes, streams: list[Any]) -> None:
    """Make a child of the server a command, run it, and end as the interpreter would. Not by leaving it: to take all
    of torch apart takes longer than most commands."""
    gc.freeze()  # a collection would write to, and so copy, every page that the commands share
    os.setsid()
    for number, file in enumerate(streams):
        os.dup2(file.detach(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed it
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    sys.argv = [module, *words]
    sys.path.insert(0, cwd)
    vars(multiprocessing.process)["_parent_process"] = None  # a command is nobody's worker
    vars(forkserver._forkserver)["ensure_running"] = lambda: None  # it runs, and multiprocessing would start another
    code: Any = 0
    try:
        if call := pickle.loads(before):
            call()
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = error if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(code, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(code & 0xFF if isinstance(code, int) else 1)
