"""The log of a rank: what it prints is also written to RUN/logs/rank-N.log.

    capture(directory / "logs", world)     # from now on
    stop()                                 # waits until all is written; also called at the end of the process

A separate process (`launch/tee.py`) copies standard error, and standard output unless that is a terminal: it stays one,
for the live display, and metrics.jsonl has the steps. So the log of a rank that is killed, aborts or segfaults is
complete, with what NCCL, gloo and faulthandler write, and the terminal shows what it would without a log.
"""

import atexit
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from fivefold.launch import tee
from fivefold.launch.watchdog import STACK_ENV
from fivefold.launch.world import World
from fivefold.support.files import open_regular

LOCK_FILE = "FIVEFOLD_LOG_LOCK"  # names a file that is locked as long as a log is written; the launcher waits for it
MAX_BYTES = 64 << 20  # of the log of one start: what comes later is shown, and dropped from the log
_DRAIN_TIMEOUT = 5.0  # seconds for the last lines to be copied
_stop_callbacks: list[Callable[[], None]] = []


def capture(folder: Path, world: World) -> None:
    """Copy what this process prints from now on. If the log cannot be written, a note says so and the run goes on."""
    path = folder / f"rank-{world.rank}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)  # on a node that has its own
        with open_regular(path, append=True) as log:
            log.write(f"{'=' * 20} {_header(world)}\n".encode())
        _redirect(path)
    except OSError as error:
        print(f"note: no log is kept in {path}: {error.strerror or error}", file=sys.stderr)


def stop() -> None:
    """Wait until all output is copied; later output goes to the terminal alone."""
    while _stop_callbacks:
        _stop_callbacks.pop()()


def _header(world: World) -> str:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    start = "" if world.start is None else f", start {world.start + 1}"
    return f"{now} rank {world.rank} of {world.size} on {os.uname().nodename}, pid {os.getpid()}{start}"


def _redirect(path: Path) -> None:
    """Put pipes in the place of this process's output, and start the process that copies them to `path`."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    fds = [fd for fd in (1, 2) if fd == 2 or not os.isatty(1)]
    original_fds = {fd: os.dup(fd) for fd in fds}
    pipes = {fd: os.pipe() for fd in fds}
    copier, ready = _start_copier(path, [each for fd in fds for each in (pipes[fd][0], original_fds[fd])])
    for fd, (read_end, write_end) in pipes.items():
        os.close(read_end)
        if ready:  # else nobody would read
            os.dup2(write_end, fd)
        os.close(write_end)
    if not ready:
        for original_fd in original_fds.values():
            os.close(original_fd)
        with suppress(subprocess.TimeoutExpired):
            copier.wait(_DRAIN_TIMEOUT)
        copier.kill()
        raise OSError(f"the copier ended with exit code {copier.returncode}")

    def restore() -> None:
        for fd, original_fd in original_fds.items():
            with suppress(OSError, ValueError):
                (sys.stdout if fd == 1 else sys.stderr).flush()
            os.dup2(original_fd, fd)
            os.close(original_fd)
        with suppress(subprocess.TimeoutExpired):
            copier.wait(_DRAIN_TIMEOUT)

    _stop_callbacks.append(restore)
    atexit.register(stop)


def _start_copier(path: Path, copied_fds: list[int]) -> tuple["subprocess.Popen[bytes]", bool]:
    """(the process, whether it copies); `copied_fds`: where it reads from and writes to, in turns."""
    arguments = [path, MAX_BYTES, os.environ.get(LOCK_FILE, ""), os.environ.get(STACK_ENV, ""), *copied_fds]
    copier = subprocess.Popen(
        # Without site-packages, and whatever the environment says: it starts at once, and is what we ship.
        [sys.executable, "-I", "-S", tee.__file__, *map(str, arguments)],
        pass_fds=copied_fds, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        start_new_session=True,  # so that who kills the rank's process group does not kill it with its last words
    )  # fmt: skip
    assert copier.stdout is not None
    ready = bool(copier.stdout.readline())
    copier.stdout.close()
    return copier, ready


def wait_until_written(lock_file: Path) -> None:
    """In the launcher, whose ranks have ended: wait until their logs are written."""
    if not lock_file.exists():
        return
    deadline = time.monotonic() + _DRAIN_TIMEOUT
    with lock_file.open() as file:
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.01)
