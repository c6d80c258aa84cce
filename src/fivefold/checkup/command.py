"""Runs one command within a time limit, and leaves no process of it behind.

    ended = run_command(["fivefold", "doctor", "--json"], {}, limit=60)
    ended.code, ended.out       # code None: it ran out of time and was ended

The command is a process of its own session, whose members are looked up when it has ended: ranks lead process groups of
their own, and a signal to the group of the command would not reach them.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

_POLL_S = 0.2
_GRACE_S = 6.0  # seconds to end by itself after SIGTERM
_KEPT = 1 << 26  # characters of an output


class CommandEnd(msgspec.Struct, frozen=True):
    """How a command ended, and what it printed."""

    code: int | None  # None: it was ended at its limit; below 0: by this signal
    seconds: float
    out: str = ""
    err: str = ""

    @property
    def in_time(self) -> bool:
        return self.code is not None


def fivefold_command(words: Sequence[str]) -> list[str]:
    """`fivefold WORDS` by the interpreter that runs this process, whatever PATH says."""
    return [sys.executable, "-m", "fivefold", *words]


def run_command(
    argv: Sequence[str],
    env: Mapping[str, str | None],
    limit: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> CommandEnd:
    """Run a command for at most `limit` seconds, or until `cancelled` returns True. `env` is laid over the environment,
    and None removes a variable."""
    full = {**os.environ, **{name: value for name, value in env.items() if value is not None}}
    for name in (name for name, value in env.items() if value is None):
        full.pop(name, None)
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            argv, env=full, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = _wait(process, start + limit, cancelled)
        finally:
            end_session(process)
        return CommandEnd(code, time.monotonic() - start, _text(out), _text(err))


def _wait(process: "subprocess.Popen[bytes]", deadline: float, cancelled: Callable[[], bool]) -> int | None:
    """The exit code; None at the deadline."""
    while time.monotonic() < deadline and not cancelled():
        with suppress(subprocess.TimeoutExpired):
            return process.wait(max(0.0, min(_POLL_S, deadline - time.monotonic())))
    return None


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """End all processes of a command's session, first by asking its leader."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    for pid in session_members(process.pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def session_members(session: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes of a session, by /proc; none where a system has no /proc."""
    members = []
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            state, _, _, sid = (folder / "stat").read_text(errors="replace").rpartition(") ")[2].split()[:4]
            if int(sid) == session and state != "Z":
                members.append(int(folder.name))
    return members


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read(_KEPT)
