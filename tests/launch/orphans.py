"""Ranks that sleep, for a caller or a server that is killed. None of this needs torch, whose import by a server of
their own would take longer than all else.

`python -m tests.launch.orphans FOLDER` calls two of them, and writes the pid of their server to FOLDER/server."""

import os
import subprocess
import sys
import time
from pathlib import Path

from fivefold.launch import processes, supervisor
from fivefold.launch.exits import End


def call(world: int, function: str, *args: object) -> list[End]:
    return processes.call(world, f"{__name__}:{function}", *args, timeout=180, grace=1, env=os.environ, threads=0)


def server(_: processes.Rank) -> int:
    """The process that ranks are forked from."""
    return os.getppid()


def note_pids(folder: Path, rank: int) -> None:
    """This rank's pid and that of a child, which must not outlive it."""
    child = subprocess.Popen(["sleep", "600"])
    (folder / f"{rank}").write_text(f"{os.getpid()} {child.pid}")


def sleep(rank: processes.Rank, folder: Path) -> None:
    note_pids(folder, rank.number)
    time.sleep(600)


if __name__ == "__main__":
    supervisor.PRELOADED_MODULES[:] = ["tests.launch.orphans"]
    folder = Path(sys.argv[1])
    from tests.launch import orphans

    [alone] = orphans.call(1, "server")
    (folder / "server").write_text(str(alone.value))
    orphans.call(2, "sleep", folder / "ranks")
