"""Ranks of this machine as processes that live and die together: how they start, report, hang and end.

`launch/local.py` uses it to start ranks that train, and `call` below to start ranks that live for one call. On Linux
torch is imported once and ranks are forked: eight imports on two cores would take longer than the first twenty steps of
a small model.
"""

import ctypes
import faulthandler
import gc
import importlib
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from fivefold.launch import fork_server
from fivefold.launch.exits import STOP_SIGNALS, End, signal_name
from fivefold.launch.group import join
from fivefold.launch.heartbeat import BEATS_ENV, Board
from fivefold.launch.host import cores, keep_freed_memory
from fivefold.launch.rendezvous import Rendezvous
from fivefold.launch.watchdog import STACK_ENV
from fivefold.launch.world import LOCAL_SIZE_ENV, World
from fivefold.support import plugins
from fivefold.support.errors import TrainingError, UserError, not_installed
from fivefold.support.ranges import seconds

# Imported once, before the forks. torch imports the first three late: the first optimizer step imports dynamo.
PRELOADED_MODULES = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "fivefold.trainer.run"]
_EXIT_CHECK_INTERVAL = (
    0.2  # seconds between checks of exit codes: a rank's pipe stays open if a child of the rank holds it
)
_STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # a rank answers with its stack
_TGKILL = getattr(ctypes.CDLL(None), "tgkill", None) if sys.platform == "linux" else None


class Yielded(NamedTuple):
    """One of the values that a rank's function yields before the rank has ended."""

    value: Any


class Processes:
    """The processes of `world` ranks. Their stacks go into files of `home`, a directory of this launcher alone.

    They are forked from a server process that has done nothing but import. Their output also goes into files of `home`,
    and they stay until `kill`, so that their sockets outlive the peers that still read from them. Ranks that are
    `attached` are forked from this process instead, share its terminal, and end by themselves.
    """

    def __init__(self, world: int, home: Path, attached: bool = False):
        self.world, self.home, self.attached = world, home, attached
        self.beats = home / "beats"
        self.board = Board(self.beats, world)
        self.ends: dict[int, End] = {}
        self._ranks: list[tuple[Any, Connection]] = []

    def start(self, function: str, *args: Any, env: Mapping[str, str], threads: int | None) -> None:
        """Each rank calls `function(rank, world, *args)`, named "module:function" so that only ranks import it.

        `threads` are torch's in each rank; None leaves that to the environment.
        """
        context: Any = multiprocessing.get_context("spawn")
        if self.attached and forkable():  # else they are forked from the server process
            context = multiprocessing.get_context("fork")
            for name in PRELOADED_MODULES:
                importlib.import_module(name)
        elif hasattr(os, "fork"):
            context = multiprocessing.get_context("forkserver")
            fork_server.start(PRELOADED_MODULES)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.world,
                LOCAL_SIZE_ENV: self.world,
                BEATS_ENV: self.beats,
            }
            own_env = {**env, **{name: str(value) for name, value in place.items()}}
            call = pickle.dumps((function, (rank, self.world, *args)))
            life = (rank, theirs, self.home, self.attached, own_env, threads, plugins.imported_plugins(), call)
            process = context.Process(target=_live, args=life)
            self._ranks.append((process, ours))
            with _without_main():
                process.start()
            theirs.close()

    def tell(self, number: int) -> None:
        """Send a signal to every rank that has not ended."""
        for process, _ in self._ranks:
            if process.pid and process.exitcode is None:
                os.kill(process.pid, number)

    def watch(
        self,
        grace: Callable[[End], float],
        timeout: float = math.inf,
        each: Callable[[], None] | None = None,
        yielded: Callable[[int, Any], None] = lambda rank, value: None,
    ) -> list[End]:
        """Wait until every rank has ended. After a failure the others have `grace` seconds; all have `timeout`, and
        each the time that its board allows it without a sign of life. `each` is called several times a second, and
        `yielded` with every value that a rank yields, which restarts the timeout."""
        deadline, silence = time.monotonic() + timeout, "hung"  # silence: the kind of end of ranks that do not answer
        while len(self.ends) < self.world and (left := deadline - time.monotonic()) > 0:
            waiting = {rank: process for rank, process in enumerate(self._ranks) if rank not in self.ends}
            ready = connection.wait([pipe for _, pipe in waiting.values()], min(left, _EXIT_CHECK_INTERVAL))
            for rank, (process, pipe) in waiting.items():
                if pipe in ready or process.exitcode is not None:
                    end = self._end_of(rank)
                    if isinstance(end, Yielded):
                        yielded(rank, end.value)
                        if silence == "hung":
                            deadline = time.monotonic() + timeout
                        continue
                    self.ends[rank] = end
                    if end.kind != "returned":
                        silence, deadline = "stopped", min(deadline, time.monotonic() + grace(end))
            if self.board.still(waiting.keys() - self.ends.keys()):
                break
            if each and not self.ends:
                each()
        silent = [rank for rank in range(self.world) if rank not in self.ends]
        last_and_paused = {rank: (self.board.last(rank), _is_paused(self._ranks[rank][0].pid)) for rank in silent}
        self._ask_for_stacks(silent)  # which wakes those that were paused
        for rank, (last, paused) in last_and_paused.items():
            self.ends[rank] = End(rank, silence, stack=self._stack(rank), last=last, paused=paused)
        return [self.ends[rank] for rank in range(self.world)]

    def kill(self) -> None:
        """Leave no process behind."""
        for process, _ in self._ranks:
            if process.pid and process.exitcode is None:
                self._kill_group(process.pid)
                process.kill()
        for process, pipe in self._ranks:
            if process.pid:
                process.join()
            pipe.close()

    def text(self, name: str) -> str:
        """The content of a file in `home`, empty if there is none: RANK.out has what a rank printed."""
        file = self.home / name
        return file.read_text(errors="replace") if file.exists() else ""

    def _end_of(self, rank: int) -> End | Yielded:
        """The next message of a rank, or how it died without one."""
        process, pipe = self._ranks[rank]
        with suppress(EOFError, OSError):
            if pipe.poll(0.1):  # a message sent before the rank died counts
                end: End | Yielded = pickle.loads(pipe.recv_bytes())
                if isinstance(end, End) and end.kind == "raised":
                    self._kill_group(process.pid)  # now: its peers see that it is gone
                return end
        process.join(1)
        code = process.exitcode
        if code == 0 and self.attached and (self.home / f"{rank}.cause").exists():  # else by os._exit, in any step
            return End(rank, "returned")
        self._kill_group(process.pid)
        error = signal_name(-code) if code is not None and code < 0 else f"exit code {code}"
        place, cause = self.board.place(rank), self.text(f"{rank}.cause")
        return End(rank, "died", error, self._stack(rank), code=code or 0, place=place, cause=cause)

    def _kill_group(self, pid: int) -> None:
        """Kill the rank's process group, which has its children. Only ranks that are not attached lead one. That of a
        dead rank is killed as soon as its death is seen, before another process can get its pid."""
        if not self.attached:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _ask_for_stacks(self, ranks: list[int]) -> None:
        """Have the ranks write their stacks, and wait up to two seconds for them."""
        if not ranks or not hasattr(faulthandler, "register"):
            return
        for pid in (self._ranks[rank][0].pid for rank in ranks):
            with suppress(ProcessLookupError):
                if _TGKILL:
                    _TGKILL(pid, pid, _STACK_SIGNAL)  # to the main thread: while another answered, it would run on
                else:
                    os.kill(pid, _STACK_SIGNAL)
                os.kill(pid, signal.SIGCONT)  # a rank that was stopped wakes to answer, and does so first
        patience = time.monotonic() + 2
        while time.monotonic() < patience and not all(self._stack(rank) for rank in ranks):
            time.sleep(0.01)
        time.sleep(0.1)  # the last answer may be half written

    def _stack(self, rank: int) -> str:
        """What faulthandler wrote about the rank's own code, one paragraph per thread."""
        threads = self.text(f"{rank}.stack").split("\n\n")
        own = "\n\n".join(thread for thread in threads if _end_with_the_launcher.__name__ not in thread)
        return own.partition(f'  File "{__file__}"')[0]


def _is_paused(pid: int) -> bool:
    """Whether SIGSTOP, or a debugger, holds the process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:  # it is gone, or this is not Linux
        return False
    return state in ("T", "t")


def forkable() -> bool:
    """Whether this process can be forked. A process that has used torch, as a notebook has, cannot: neither thread
    pools nor CUDA survive a fork. One that has only imported torch, as a forked process may have, still has a single
    thread."""
    if sys.platform != "linux" or "torch" not in sys.modules:
        return sys.platform == "linux"
    return len(os.listdir("/proc/self/task")) == 1 and not sys.modules["torch"].cuda.is_initialized()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the caller's script, which multiprocessing would have each rank run; ranks get their function by name."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _live(
    rank: int,
    pipe: Connection,
    home: Path,
    attached: bool,
    env: dict[str, str],
    threads: int | None,
    names: list[str],
    call: bytes,
) -> None:
    """The whole life of a rank, which imports the plugins of its launcher: `names`."""
    gc.freeze()  # a collection would write to, and so copy, every page that the ranks share
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # until the rank has a way to answer it
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    if not attached:
        os.setpgid(0, 0)  # Ctrl-C is for the caller, who ends this group
        out = os.open(home / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(out, stream)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr,unused-ignore]
    stacks = open(home / f"{rank}.stack", "w")  # noqa: SIM115 - open as long as the rank lives
    os.environ[STACK_ENV] = stacks.name
    faulthandler.enable(stacks)
    if hasattr(faulthandler, "register"):
        faulthandler.register(_STACK_SIGNAL, stacks)
    try:
        if threads:
            import torch

            torch.set_num_threads(threads)
        for name in names:
            plugins.load(name)
        function, args = pickle.loads(call)
        value = import_function(function)(*args)
        if isinstance(value, Generator):
            for item in value:
                pipe.send_bytes(pickle.dumps(Yielded(item)))
            value = None
        message = pickle.dumps(End(rank, "returned", value=value))  # by value: not multiprocessing's shared memory
    except (Exception, SystemExit) as error:
        user_error = error if isinstance(error, UserError) else plugins.plugin_error(error)
        if isinstance(error, SystemExit) and user_error is None:
            (home / f"{rank}.cause").write_text(repr(error.__context__))
            raise
        text = f"{type(error).__name__}: {error}"
        message = pickle.dumps(End(rank, "raised", text, traceback.format_exc(), time.monotonic(), user_error))
    pipe.send_bytes(message)
    if not attached:
        threading.Event().wait()


def import_function(name: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _end_with_the_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


# ---- ranks ----------------------------------------------------------------------------------------------------------
# Ranks of this machine that live for one call.
#
#     run(4, "module:function", argument, timeout=60)     # [function(rank, argument) of each rank], or RankError
#     run(..., each=show)                                 # for a generator function: show([value of each rank])
#
# Nothing outlives a call: no process group, no cache that knows its groups by name, no rank that hangs. The server that
# forks them starts with the first call (seconds: it imports torch) and ends with this process; a call then takes a
# tenth of a second. What a rank prints is kept, and shown only when a rank fails.


_START_LOCK = Lock()  # threads may call, and `start` hides the caller's script from multiprocessing for a moment
_THREADS_ENV = "OMP_NUM_THREADS"
_allowed: int | None = None
_REPORT_GRACE = 1.0  # seconds that the other ranks have after a first failure, to report theirs


@dataclass(frozen=True)
class Rank:
    number: int
    world: int
    home: Path  # a directory that the ranks of one call share

    def join(self, backend: str, timeout: float = 3600.0) -> None:
        """Enter a process group with the other ranks of the call. A rank that hangs is ended, and named, by `watch`."""
        meeting = Rendezvous(file=str(self.home / "store"), alone=True)
        world = World(self.number, self.world, self.number, self.world, joined=True, meeting=meeting)
        join(world, backend, timeout)


class RankError(TrainingError):
    """Ranks died, raised or hung. `rank` is the one to blame; `kind`, `error` and `stack` say how it ended; `ranks` are
    all that ended in the same way, not because of a peer; `ends` has every rank's end, with the values of those that
    returned."""

    def __init__(self, ends: list[End], timeout: float = 0.0):
        self.ends, first = ends, min(ends, key=lambda end: end.blame)
        self.rank, self.kind, self.error, self.stack = first.rank, first.kind, first.error, first.stack
        self.ranks = [end.rank for end in ends if (end.kind, end.doubt) == (first.kind, first.doubt)]
        self.details = "\n".join([first.stack, *first.output.splitlines()[-20:]]).strip()
        sentence = f"rank {self.rank} {first.how}".replace("gave no answer", f"gave no answer within {timeout:.0f} s")
        also_hung = [str(end.rank) for end in ends if end.kind == "hung" and end is not first]
        super().__init__(sentence + (f"; with it hang {', '.join(also_hung)}" if also_hung else ""))


def run(
    world: int, function: str, *args: Any, timeout: float, each: Callable[[list[Any]], None] | None = None
) -> list[Any]:
    """Returns what `function(Rank, *args)` returned on each of `world` ranks. The function is given by name, so that
    only the ranks import it.

    If it yields, `each` is called with the n-th values of all ranks, and `timeout` is the limit for each value."""
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
    """How many threads whoever started this process allows; `run` itself sets the same variable in its first call."""
    global _allowed
    if _allowed is None:
        given = os.environ.get(_THREADS_ENV, "").partition(",")[0].strip()  # a list has a number for each nested level
        _allowed = int(given) if given.isdecimal() and int(given) else cores()
    return _allowed


def call(
    world: int, function: str, *args: Any, timeout: float, grace: float, env: Mapping[str, str], threads: int,
    each: Callable[[list[Any]], None] | None = None,
) -> list[End]:  # fmt: skip
    """Runs `function(Rank, *args)` on each rank; returns how each of them ended, and what it printed."""
    waiting: list[deque[Any]] = [deque() for _ in range(world)]  # by rank: values whose peers have not yielded theirs

    def yielded(rank: int, value: Any) -> None:
        waiting[rank].append(value)
        if each and all(waiting):
            each([values.popleft() for values in waiting])

    with tempfile.TemporaryDirectory(prefix="fivefold-") as home:
        processes = Processes(world, Path(home))
        try:
            with _START_LOCK:
                processes.start(f"{__name__}:_act", home, function, args, env=env, threads=threads)
            ends = processes.watch(lambda end: grace, timeout, yielded=yielded)
        finally:
            processes.kill()
        return [replace(end, output=processes.text(f"{end.rank}.out")) for end in ends]


def _act(rank: int, world: int, home: str, function: str, args: tuple[Any, ...]) -> Any:
    return import_function(function)(Rank(rank, world, Path(home)), *args)
