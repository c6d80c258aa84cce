"""Calls a function on ranks of this machine that live for one call.

    run(4, "module:function", argument, timeout=60)     # [function(rank, argument) of each rank], or RankError
    run(..., each=show)                                 # for a generator function: show([value of each rank])

Nothing outlives a call: no process group, no cache that knows its groups by name, no rank that hangs. The server that
forks them starts with the first call (seconds: it imports torch) and ends with this process; a call then takes a tenth
of a second. What a rank prints is kept, and shown only when a rank fails.
"""

import os
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from fivefold.launch.exits import End
from fivefold.launch.group import join
from fivefold.launch.host import cores, keep_freed_memory
from fivefold.launch.rendezvous import Rendezvous
from fivefold.launch.supervisor import Supervisor, import_function
from fivefold.launch.world import World
from fivefold.support.errors import TrainingError, UserError, not_installed
from fivefold.support.ranges import seconds

_START_LOCK = Lock()  # threads may call, and `start` hides the caller's script from multiprocessing for a moment
_THREADS_ENV = "OMP_NUM_THREADS"
_REPORT_GRACE = 1.0  # seconds that the other ranks have after a first failure, to report theirs
_allowed_threads: int | None = None  # what _threads_of_user found in the first call


@dataclass(frozen=True)
class Rank:
    """What a function that is called on ranks gets to know of its own."""

    number: int
    world: int
    home: Path  # a directory that the ranks of one call share

    def join(self, backend: str, timeout: float = 3600.0) -> None:
        """Joins a process group with the other ranks of the call.

        `timeout` is long: the call's own timeout comes first, and names the rank that hangs.
        """
        meeting = Rendezvous(file=str(self.home / "store"), alone=True)
        world = World(self.number, self.world, self.number, self.world, joined=True, meeting=meeting)
        join(world, backend, timeout)


class RankError(TrainingError):
    """Ranks died, raised or hung; the attributes say which, and how."""

    def __init__(self, ends: list[End], timeout: float = 0.0):
        self.ends = ends  # of all ranks, with the values of those that returned
        first = min(ends, key=lambda end: end.blame)
        self.rank, self.kind, self.error, self.stack = first.rank, first.kind, first.error, first.stack  # to blame
        self.ranks = [end.rank for end in ends if (end.kind, end.doubt) == (first.kind, first.doubt)]  # ended like it
        self.details = "\n".join([first.stack, *first.output.splitlines()[-20:]]).strip()
        sentence = f"rank {self.rank} {first.how}".replace("gave no answer", f"gave no answer within {timeout:.0f} s")
        also_hung = [str(end.rank) for end in ends if end.kind == "hung" and end is not first]
        super().__init__(sentence + (f"; with it hang {', '.join(also_hung)}" if also_hung else ""))


def run(
    world: int, function: str, *args: Any, timeout: float, each: Callable[[list[Any]], None] | None = None
) -> list[Any]:
    """Returns what `function(Rank, *args)` returned on each of `world` ranks.

    The function is given by name, so that only the ranks import it. If it is a generator, `each` is called with the
    n-th values of all ranks as soon as the last of them has come, and `timeout` is the limit for each value.
    """
    seconds("timeout", timeout)
    if not_installed("torch"):  # raised here, once, and not by each rank
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    threads = max(1, min(cores() // world, _threads_of_user()))
    os.environ.setdefault(_THREADS_ENV, str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin starve the other ranks
    keep_freed_memory()
    env = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ}  # how many processes each rank compiles with
    ends = call(world, function, *args, timeout=timeout, grace=_REPORT_GRACE, env=env, threads=threads, each=each)
    if any(end.kind != "returned" for end in ends):
        cause = min(ends, key=lambda end: end.blame).value
        raise cause if isinstance(cause, UserError) else RankError(ends, timeout)
    return [end.value for end in ends]


def _threads_of_user() -> int:
    """How many threads OMP_NUM_THREADS allowed when this process began; all cores, if it was not set.

    Read in the first call only, since `run` sets the variable itself.
    """
    global _allowed_threads
    if _allowed_threads is None:
        given = os.environ.get(_THREADS_ENV, "").partition(",")[0].strip()  # a list has a number for each nested level
        _allowed_threads = int(given) if given.isdecimal() and int(given) else cores()
    return _allowed_threads


def call(
    world: int, function: str, *args: Any, timeout: float, grace: float, env: Mapping[str, str], threads: int,
    each: Callable[[list[Any]], None] | None = None,
) -> list[End]:  # fmt: skip
    """Runs `function(Rank, *args)` on each rank; returns how each of them ended, and what it printed."""
    pending: list[deque[Any]] = [deque() for _ in range(world)]  # by rank: values that not all ranks have yielded yet

    def on_value(rank: int, value: Any) -> None:
        pending[rank].append(value)
        if each and all(pending):
            each([values.popleft() for values in pending])

    with tempfile.TemporaryDirectory(prefix="fivefold-") as home:
        supervisor = Supervisor(world, Path(home))
        try:
            with _START_LOCK:
                supervisor.start(
                    f"{__name__}:{_call_function.__name__}", home, function, args, env=env, threads=threads
                )
            ends = supervisor.watch(lambda end: grace, timeout, on_value=on_value)
        finally:
            supervisor.kill()
        return [replace(end, stack=_own_stack(end), output=supervisor.read_file(f"{end.rank}.out")) for end in ends]


def _own_stack(end: End) -> str:
    """What faulthandler wrote, up to this file's frame. A traceback begins with that frame, so it stays whole."""
    return end.stack if end.kind == "raised" else end.stack.partition(f'  File "{__file__}"')[0]


def _call_function(rank: int, world: int, home: str, function: str, args: tuple[Any, ...]) -> Any:
    return import_function(function)(Rank(rank, world, Path(home)), *args)
