"""Ranks of this machine that live for one call, each a process forked from a server that has imported torch.

    run(4, "module:function", argument, timeout=60)     # [function(rank, argument) of each rank], or RankError

Nothing outlives a call: not a process group, not a cache that knows its groups by name, not a rank that hangs. The
server starts with the first call (seconds: it imports torch) and ends with this process; a call then takes a tenth of a
second. What a rank prints is kept and shown only when a rank fails.
"""

import faulthandler
import importlib
import linecache
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from fivefold.launch.allocator import keep_freed_memory
from fivefold.launch.cores import cores
from fivefold.launch.world import HERE
from fivefold.support.errors import TrainingError, UserError

# torch imports these late, and each rank would for itself: torch.optim, FSDP2 and checkpoints import dynamo.
_PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "fivefold.verify.measure"]
_GRACE = 1.0  # seconds that the others have after a first failure, to say what they know of it
_FRAME = re.compile(r'File "(.+)", line (\d+)')
_CUT = re.compile(r"onnection (closed|reset|refused)|roken pipe|ocket closed|DistNetworkError")
_METHOD = "forkserver" if hasattr(os, "fork") else "spawn"


@dataclass(frozen=True)
class Rank:
    number: int
    world: int
    home: Path  # a directory that the ranks of one call share

    def join(self, backend: str, timeout: float = 3600.0) -> None:
        """Enter a process group with the other ranks of the call. Hangs are ended from outside, and named there."""
        from datetime import timedelta

        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        store = FileStore(str(self.home / "store"), self.world)
        dist.init_process_group(
            backend, store=store, rank=self.number, world_size=self.world, timeout=timedelta(seconds=timeout)
        )


class RankError(TrainingError):
    """A rank died, raised or hung: `rank` is the one to blame."""

    def __init__(self, rank: int, sentence: str, details: str = ""):
        super().__init__(sentence)
        self.rank, self.details = rank, details


@dataclass(frozen=True)
class _End:
    """How a rank ended; a value if it returned."""

    rank: int
    how: str  # returned | raised | died | hung
    value: Any = None
    error: str = ""
    stack: str = ""

    @property
    def where(self) -> tuple[str, int] | None:
        """The innermost line of a stack that faulthandler wrote."""
        found = _FRAME.search(self.stack)
        return (found[1], int(found[2])) if found else None

    @property
    def waits(self) -> bool:
        """For a peer, which is then the one to blame: in a wait, inside torch, or at a connection that was cut."""
        line = "".join(linecache.getline(*self.where)) if self.where else ""
        inside = self.where is not None and "/torch/" in self.where[0]
        return inside or "wait(" in line or bool(_CUT.search(self.error))

    @property
    def blame(self) -> tuple[bool, bool, int, int]:
        """Sorts the rank that explains the others first."""
        return self.how == "returned", self.waits, ["died", "raised", "hung", "returned"].index(self.how), self.rank


def run(world: int, function: str, *args: Any, timeout: float) -> list[Any]:
    """What `function(Rank, *args)` returned on each of `world` ranks. It is named, so that only they import it."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // world)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin starve the other ranks
    keep_freed_memory()
    context = get_context(_METHOD)
    if _METHOD == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="fivefold-") as home:
        processes, pipes = [], []
        try:
            for number in range(world):
                ours, theirs = context.Pipe()
                rank = Rank(number, world, Path(home))
                process: Any = context.Process(target=_live, args=(rank, theirs, function, args), daemon=True)  # type: ignore[attr-defined]
                with _without_main():
                    process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            ends = _watch(processes, pipes, Path(home), timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
        ends_by_blame = sorted(ends, key=lambda end: end.blame)
        if ends_by_blame[0].how != "returned":
            _raise(ends_by_blame, Path(home), timeout)
    return [end.value for end in ends]


@contextmanager
def _without_main() -> Iterator[None]:
    """Ranks are told by name what to run; multiprocessing would have each of them run the caller's script first."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _watch(processes: list[Any], pipes: list[Connection], home: Path, timeout: float) -> list[_End]:
    """Until every rank has ended, a failure's grace is over, or it takes too long."""
    ends: dict[int, _End] = {}
    deadline, failed = time.monotonic() + timeout, False
    while len(ends) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        waiting = [rank for rank in range(len(pipes)) if rank not in ends]
        ready = connection.wait([pipes[r] for r in waiting] + [processes[r].sentinel for r in waiting], left)
        for rank in waiting:
            if pipes[rank] in ready or processes[rank].sentinel in ready:
                ends[rank] = _end_of(rank, pipes[rank], processes[rank])
                if ends[rank].how != "returned" and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
    silent = [rank for rank in range(len(pipes)) if rank not in ends]
    for rank in silent:
        with suppress(OSError, AttributeError):
            os.kill(processes[rank].pid, signal.SIGUSR1)  # its stack goes into a file
    time.sleep(0.3 if silent else 0)
    for rank in silent:
        ends[rank] = _End(rank, "hung", stack=_text(home / f"{rank}.stack"))
    return [ends[rank] for rank in range(len(pipes))]


def _end_of(rank: int, pipe: Connection, process: Any) -> _End:
    try:
        if pipe.poll(0.1):  # what it said before it died counts
            return _End(rank, *pipe.recv())
    except (EOFError, OSError):
        pass
    process.join(1)
    code = process.exitcode
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return _End(rank, "died", error=how)


def _raise(ends: list[_End], home: Path, timeout: float) -> NoReturn:
    """An error that names the first of `ends`."""
    end = ends[0]
    said = "\n".join(_text(home / f"{end.rank}.out").splitlines()[-20:])
    if isinstance(end.value, UserError):
        raise end.value
    if end.how == "hung":
        place = f"; it is in {end.where[0]}, line {end.where[1]}" if end.where else ""
        others = [str(other.rank) for other in ends[1:] if other.how == "hung"]
        along = f"; with it hang {', '.join(others)}" if others else ""
        raise RankError(end.rank, f"rank {end.rank} gave no answer within {timeout:.0f} s{place}{along}", end.stack)
    verb = "died by" if end.how == "died" else "failed with"
    raise RankError(end.rank, f"rank {end.rank} {verb} {end.error}", f"{end.stack}\n{said}".strip())


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _live(rank: Rank, pipe: Connection, function: str, args: tuple[Any, ...]) -> None:
    """The whole life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who ends us
    out = os.open(rank.home / f"{rank.number}.out", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(out, stream)
    stacks = open(rank.home / f"{rank.number}.stack", "w")  # noqa: SIM115 - open as long as the rank lives
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    threading.Thread(target=_end_with_the_caller, args=(pipe,), daemon=True).start()
    try:
        import torch

        os.environ[HERE] = str(rank.world)
        torch.set_num_threads(max(1, cores() // rank.world))
        pipe.send(("returned", named(function)(rank, *args)))
    except BaseException as error:
        known = error if isinstance(error, UserError) else None
        pipe.send(("raised", known, f"{type(error).__name__}: {error}", traceback.format_exc()))
    threading.Event().wait()  # our sockets outlive the peers that still read from them, until the caller ends us


def named(name: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _end_with_the_caller(pipe: Connection) -> None:
    with suppress(EOFError, OSError):
        pipe.recv()  # nothing comes but the end
    os._exit(1)
