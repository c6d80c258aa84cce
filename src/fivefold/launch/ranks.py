"""Ranks of this machine that live for one call.

    run(4, "module:function", argument, timeout=60)     # [function(rank, argument) of each rank], or RankError
    run(..., each=tell)                                 # of a generator function: tell([what each rank yields])

Nothing outlives a call: not a process group, not a cache that knows its groups by name, not a rank that hangs. The
server that forks them starts with the first call (seconds: it imports torch) and ends with this process; a call then
takes a tenth of a second. What a rank prints is kept, and shown only when a rank fails.
"""

import os
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from fivefold.launch.allocator import keep_freed_memory
from fivefold.launch.cores import cores
from fivefold.launch.ends import End
from fivefold.launch.meeting import Meeting
from fivefold.launch.processes import Processes, named
from fivefold.launch.world import World, join
from fivefold.support.errors import TrainingError, UserError, absent
from fivefold.support.ranges import seconds

_STARTING = Lock()  # threads may call, and `start` hides the caller's script from multiprocessing for a moment
_GRACE = 1.0  # seconds that the others have after a first failure, to say what they know of it


@dataclass(frozen=True)
class Rank:
    number: int
    world: int
    home: Path  # a directory that the ranks of one call share

    def join(self, backend: str, timeout: float = 3600.0) -> None:
        """Enter a process group with the other ranks of the call. Hangs are ended from outside, and named there."""
        meeting = Meeting(file=str(self.home / "store"), alone=True)
        here = World(self.number, self.world, self.number, self.world, joined=True, meeting=meeting)
        join(here, backend, timeout)


class RankError(TrainingError):
    """Ranks died, raised or hung. `rank` is the one to blame, `kind`, `error` and `stack` say how it ended, `ranks` are
    all that ended likewise on their own account, and `ends` has every rank's end, with the values of some."""

    def __init__(self, ends: list[End], timeout: float = 0.0):
        self.ends, first = ends, min(ends, key=lambda end: end.blame)
        self.rank, self.kind, self.error, self.stack = first.rank, first.kind, first.error, first.stack
        self.ranks = [end.rank for end in ends if (end.kind, end.doubt) == (first.kind, first.doubt)]
        self.details = "\n".join([first.stack, *first.output.splitlines()[-20:]]).strip()
        sentence = f"rank {self.rank} {first.how}".replace("gave no answer", f"gave no answer within {timeout:.0f} s")
        others = [str(end.rank) for end in ends if end.kind == "hung" and end is not first]
        super().__init__(sentence + (f"; with it hang {', '.join(others)}" if others else ""))


def run(
    world: int, function: str, *args: Any, timeout: float, each: Callable[[list[Any]], None] | None = None
) -> list[Any]:
    """What `function(Rank, *args)` returned on each of `world` ranks. It is named, so that only they import it.

    Of a function that yields, `each` is called with the n-th values of all ranks, and `timeout` is for one of them."""
    seconds("timeout", timeout)
    if absent("torch"):  # said here, once, and not by each rank
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    threads = max(1, cores() // world)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin starve the other ranks
    keep_freed_memory()
    env = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ}  # processes, of each rank
    ends = call(world, function, *args, timeout=timeout, grace=_GRACE, env=env, threads=threads, each=each)
    if any(end.kind != "returned" for end in ends):
        cause = min(ends, key=lambda end: end.blame).value
        raise cause if isinstance(cause, UserError) else RankError(ends, timeout)
    return [end.value for end in ends]


def call(
    world: int, function: str, *args: Any, timeout: float, grace: float, env: Mapping[str, str], threads: int,
    each: Callable[[list[Any]], None] | None = None,
) -> list[End]:  # fmt: skip
    """How each rank of `function(Rank, *args)` ended, and what it printed."""
    heard: list[deque[Any]] = [deque() for _ in range(world)]

    def said(rank: int, value: Any) -> None:
        heard[rank].append(value)
        if each and all(heard):
            each([values.popleft() for values in heard])

    with tempfile.TemporaryDirectory(prefix="fivefold-") as home:
        processes = Processes(world, Path(home))
        try:
            with _STARTING:
                processes.start(f"{__name__}:_act", home, function, args, env=env, threads=threads)
            ends = processes.watch(lambda end: grace, timeout, said=said)
        finally:
            processes.kill()
        return [replace(end, output=processes.text(f"{end.rank}.out")) for end in ends]


def _act(rank: int, world: int, home: str, function: str, args: tuple[Any, ...]) -> Any:
    return named(function)(Rank(rank, world, Path(home)), *args)
