"""Ranks of this machine as processes that live and die together: how they start, report, hang and end.

Every launcher of this package uses it: `launch/local.py` for ranks that train, `launch/ranks.py` for ranks that live
for one call. On Linux torch is imported once and ranks are forked: eight imports on two cores would take longer than
the first twenty steps of a small model.
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
import threading
import time
import traceback
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.launch.ends import STOPPING, End, signal_name
from fivefold.launch.heartbeat import BEATS, Board
from fivefold.launch.logs import STACK
from fivefold.launch.world import HERE
from fivefold.support.errors import UserError

# torch imports the first three late, and each rank would for itself: the first step of an optimizer imports dynamo.
PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "fivefold.train.run"]
_LOOK = 0.2  # seconds: a child that a rank has forked may keep the pipe open that tells of the rank's end
_STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # a rank answers with its stack
_TGKILL = getattr(ctypes.CDLL(None), "tgkill", None) if sys.platform == "linux" else None


class Said(NamedTuple):
    """What a rank says before it has ended: one of the values that its function yields."""

    value: Any


class Processes:
    """`world` ranks. Their stacks go into files of `home`, a directory of this launcher's own.

    They are forked from a server that has only imported, what they print goes there too, and they stay until `kill`, so
    that their sockets outlive the peers that still read from them. Ranks that are `attached` are forked from this
    process instead, share its terminal, and end by themselves.
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
        if self.attached and forkable():  # else a server that has only imported is
            context = multiprocessing.get_context("fork")
            for name in PRELOAD:
                importlib.import_module(name)
        elif hasattr(os, "fork"):
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOAD)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, HERE: self.world, BEATS: self.beats}
            mine = {**env, **{name: str(value) for name, value in place.items()}}
            call = pickle.dumps((function, (rank, self.world, *args)))
            life = (rank, theirs, self.home, self.attached, mine, threads, call)
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
        said: Callable[[int, Any], None] = lambda rank, value: None,
    ) -> list[End]:
        """Wait until every rank has ended. After a failure the others have `grace` seconds; all have `timeout`, and
        each the time that it says it may take without a sign of life. `each` is called several times a second, and
        `said` with every value that a rank yields, from which on the time begins anew."""
        deadline, silence = time.monotonic() + timeout, "hung"
        while len(self.ends) < self.world and (left := deadline - time.monotonic()) > 0:
            waiting = {rank: one for rank, one in enumerate(self._ranks) if rank not in self.ends}
            ready = connection.wait([pipe for _, pipe in waiting.values()], min(left, _LOOK))
            for rank, (process, pipe) in waiting.items():
                if pipe in ready or process.exitcode is not None:
                    end = self._end_of(rank)
                    if isinstance(end, Said):
                        said(rank, end.value)
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
        seen = {rank: (self.board.last(rank), _paused(self._ranks[rank][0].pid)) for rank in silent}
        self._ask_for_stacks(silent)  # which wakes those that were paused
        for rank, (last, paused) in seen.items():
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
        """Of a file in the ranks' home: RANK.out has what a rank printed."""
        file = self.home / name
        return file.read_text(errors="replace") if file.exists() else ""

    def _end_of(self, rank: int) -> End | Said:
        process, pipe = self._ranks[rank]
        with suppress(EOFError, OSError):
            if pipe.poll(0.1):  # what a rank said before it died counts
                end: End | Said = pickle.loads(pipe.recv_bytes())
                if isinstance(end, End) and end.kind == "raised":
                    self._kill_group(process.pid)  # now: its peers see that it is gone
                return end
        process.join(1)
        code = process.exitcode
        if code == 0 and self.attached:
            return End(rank, "returned")
        self._kill_group(process.pid)
        error = signal_name(-code) if code is not None and code < 0 else f"exit code {code}"
        place, cause = self.board.place(rank), self.text(f"{rank}.cause")
        return End(rank, "died", error, self._stack(rank), code=code or 0, place=place, cause=cause)

    def _kill_group(self, pid: int) -> None:
        """A rank that is not attached leads a process group, of which are its children. That of a dead rank is killed
        as soon as its death is seen, before its number can be another's."""
        if not self.attached:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _ask_for_stacks(self, ranks: list[int]) -> None:
        if not ranks or not hasattr(faulthandler, "register"):
            return
        for pid in (self._ranks[rank][0].pid for rank in ranks):
            with suppress(ProcessLookupError):
                if _TGKILL:
                    _TGKILL(pid, pid, _STACK_SIGNAL)  # to the main thread: another's answer would let it run on first
                else:
                    os.kill(pid, _STACK_SIGNAL)
                os.kill(pid, signal.SIGCONT)  # a rank that was stopped wakes to answer, and does so first
        patience = time.monotonic() + 2
        while time.monotonic() < patience and not all(self._stack(rank) for rank in ranks):
            time.sleep(0.01)
        time.sleep(0.1)  # the last answer may be half written

    def _stack(self, rank: int) -> str:
        """What faulthandler wrote of the rank's own code, one paragraph a thread."""
        threads = self.text(f"{rank}.stack").split("\n\n")
        own = "\n\n".join(thread for thread in threads if _end_with_the_launcher.__name__ not in thread)
        return own.partition(f'  File "{__file__}"')[0]


def _paused(pid: int) -> bool:
    """Whether SIGSTOP, or a debugger, holds the process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:  # it is gone, or this is not Linux
        return False
    return state in ("T", "t")


def forkable() -> bool:
    """Whether this process can be forked. One that has used torch, as a notebook has, cannot: neither the threads of a
    pool nor CUDA survive it. One that has only imported it, as a forked process may have, has a single thread."""
    if sys.platform != "linux" or "torch" not in sys.modules:
        return sys.platform == "linux"
    return len(os.listdir("/proc/self/task")) == 1 and not sys.modules["torch"].cuda.is_initialized()


@contextmanager
def _without_main() -> Iterator[None]:
    """Ranks are told by name what to run; multiprocessing would have each of them run the caller's script first."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _live(
    rank: int, pipe: Connection, home: Path, attached: bool, env: dict[str, str], threads: int | None, call: bytes
) -> None:
    """The whole life of a rank."""
    gc.freeze()  # a collection would write to, and so copy, every page that the ranks share
    for number in STOPPING:
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
    os.environ[STACK] = stacks.name
    faulthandler.enable(stacks)
    if hasattr(faulthandler, "register"):
        faulthandler.register(_STACK_SIGNAL, stacks)
    try:
        if threads:
            import torch

            torch.set_num_threads(threads)
        function, args = pickle.loads(call)
        value = named(function)(*args)
        if isinstance(value, Generator):
            for one in value:
                pipe.send_bytes(pickle.dumps(Said(one)))
            value = None
        message = pickle.dumps(End(rank, "returned", value=value))  # by value: not multiprocessing's shared memory
    except Exception as error:
        known = error if isinstance(error, UserError) else None
        text = f"{type(error).__name__}: {error}"
        message = pickle.dumps(End(rank, "raised", text, traceback.format_exc(), time.monotonic(), known))
    except SystemExit as leaving:
        (home / f"{rank}.cause").write_text(repr(leaving.__context__))
        raise
    pipe.send_bytes(message)
    if not attached:
        threading.Event().wait()


def named(name: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _end_with_the_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)
