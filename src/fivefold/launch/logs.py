"""The log of a rank: all that it prints is also written to RUN/logs/rank-N.log.

    keep(directory / "logs", world)     # from now on
    end()                               # waits until all is written; called at the end of the process, too

A separate process copies both of its streams (`launch/tee.py`), so that the log of a rank that is killed, aborts or
segfaults is complete, with what NCCL, gloo and faulthandler write. The terminal shows what it would without a log.
Standard output that is a terminal stays one, for the live display, and is not copied: metrics.jsonl has the steps.
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
from fivefold.launch.watchdog import STACK
from fivefold.launch.world import World
from fivefold.support.files import open_regular

LIVES = "FIVEFOLD_LOGGING"  # names a file that is locked as long as a log is written; the launcher waits for the lock
MOST = 64 << 20  # bytes of the log of one start
_PATIENCE = 5.0  # seconds for the last lines to be copied
_ends: list[Callable[[], None]] = []


def keep(folder: Path, world: World) -> None:
    """Copy what this process prints from now on. If the log cannot be written, a note says so and the run goes on."""
    path = folder / f"rank-{world.rank}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)  # on a node that has its own
        with open_regular(path, append=True) as log:
            log.write(f"{'=' * 20} {_header(world)}\n".encode())
        _start(path)
    except OSError as error:
        print(f"note: no log is kept in {path}: {error.strerror or error}", file=sys.stderr)


def end() -> None:
    """Wait until all output is copied; later output goes to the terminal alone."""
    while _ends:
        _ends.pop()()


def wait_for(lives: Path) -> None:
    """In the launcher, whose ranks have ended: wait until their logs are written."""
    if not lives.exists():
        return
    deadline = time.monotonic() + _PATIENCE
    with lives.open() as file:
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.01)


def _header(world: World) -> str:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    start = "" if world.start is None else f", start {world.start + 1}"
    return f"{now} rank {world.rank} of {world.size} on {os.uname().nodename}, pid {os.getpid()}{start}"


def _start(path: Path) -> None:
    """Start the process that copies to `path`, and put its pipes in the place of the streams."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    streams = [number for number in (1, 2) if number == 2 or not os.isatty(1)]
    terminals = {number: os.dup(number) for number in streams}
    pipes = {number: os.pipe() for number in streams}
    handles = [handle for number in streams for handle in (pipes[number][0], terminals[number])]
    arguments = [path, MOST, os.environ.get(LIVES, ""), os.environ.get(STACK, ""), *handles]
    copier = subprocess.Popen(
        [sys.executable, "-I", "-S", tee.__file__, *map(str, arguments)],
        pass_fds=handles, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert copier.stdout is not None
    begun = copier.stdout.readline()
    copier.stdout.close()
    for number, (reads, writes) in pipes.items():
        os.close(reads)
        if begun:  # else it could not start, and nobody would read
            os.dup2(writes, number)
        os.close(writes)
    if not begun:
        raise OSError(f"the copier ended with exit code {copier.wait()}")

    def stop() -> None:
        for number, terminal in terminals.items():
            with suppress(OSError, ValueError):
                (sys.stdout if number == 1 else sys.stderr).flush()
            os.dup2(terminal, number)
            os.close(terminal)
        with suppress(subprocess.TimeoutExpired):
            copier.wait(_PATIENCE)

    _ends.append(stop)
    atexit.register(end)
