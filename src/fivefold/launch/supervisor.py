"""Starts ranks as processes of this machine, watches them, and ends them: how they report, hang and die.

`local.py` uses it for ranks that train, and `processes.py` for ranks that live for one call.

    supervisor = Supervisor(world, home)
    supervisor.start("module:function", *args, env=os.environ, threads=1)
    ends = supervisor.watch(lambda end: 1.0, timeout=60)
    supervisor.kill()

On Linux torch is imported once and ranks are forked: eight imports on two cores would take longer than the first twenty
steps of a small model.
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

from fivefold.launch import fork_server
from fivefold.launch.exits import STOP_SIGNALS, End, signal_name
from fivefold.launch.heartbeat import BEATS_ENV, Board
from fivefold.launch.watchdog import STACK_ENV
from fivefold.launch.world import LOCAL_SIZE_ENV
from fivefold.support import plugins
from fivefold.support.errors import UserError

# Imported once, before the forks. torch imports the first three late: the first optimizer step imports dynamo.
PRELOADED_MODULES = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "fivefold.trainer.run",
    "fivefold.launch.processes",
]
# Seconds between checks of exit codes: the pipe of a dead rank stays open if a child of the rank holds it.
_EXIT_CHECK_INTERVAL = 0.2
_STACK_TIMEOUT = 2.0  # seconds in which ranks write their stacks
_STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # a rank answers it with its stack
_TGKILL = getattr(ctypes.CDLL(None), "tgkill", None) if sys.platform == "linux" else None  # Python has no call for it


class YieldedValue(NamedTuple):
    """A message of a rank whose function is a generator: one of the values that it yields."""

    value: Any


class Supervisor:
    """Starts, watches and kills the processes of `world` ranks; their stacks go into files of the directory `home`.

    By default they are forked from a server process that has done nothing but import. Their output goes into files of
    `home` too, and a rank that has returned stays until `kill`, so that its sockets outlive the peers that still read
    from them. Ranks that are `attached` are forked from this process instead, share its terminal, and exit themselves.
    """

    def __init__(self, world: int, home: Path, *, attached: bool = False):
        self.world, self.home, self.attached = world, home, attached
        self.board = Board(home / "beats", world)
        self.ends: dict[int, End] = {}
        self._ranks: list[tuple[Any, Connection]] = []  # (process, the launcher's end of its pipe)

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
            launcher_end, rank_end = context.Pipe()
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.world,
                LOCAL_SIZE_ENV: self.world,
                BEATS_ENV: self.home / "beats",
            }
            setup = _RankSetup(
                rank=rank,
                home=self.home,
                attached=self.attached,
                env={**env, **{name: str(value) for name, value in variables.items()}},
                threads=threads,
                plugins=plugins.imported_plugins(),
                call=pickle.dumps((function, (rank, self.world, *args))),
            )
            process = context.Process(target=_rank_main, args=(setup, rank_end))
            self._ranks.append((process, launcher_end))
            with _without_main():
                process.start()
            rank_end.close()

    def send_signal(self, number: int) -> None:
        """Sends a signal to every rank that runs."""
        for process, _ in self._ranks:
            if process.pid and process.exitcode is None:
                os.kill(process.pid, number)

    def watch(
        self,
        grace: Callable[[End], float],
        timeout: float = math.inf,
        on_check: Callable[[], None] | None = None,
        on_value: Callable[[int, Any], None] = lambda rank, value: None,
    ) -> list[End]:
        """Waits until all ranks have ended; returns their ends, by rank.

        Ranks that do not end are given up: `grace(end)` seconds after the first failure, after `timeout`, or as soon as
        one of them was still for longer than its board allows. `on_check` is called several times a second until a rank
        has ended, and `on_value` with every value that a rank yields, which also restarts the timeout.
        """
        deadline = time.monotonic() + timeout
        unanswered = "hung"  # the kind of end of ranks that are given up: "stopped" after a failure of another
        while len(self.ends) < self.world and (left := deadline - time.monotonic()) > 0:
            running = {rank: process for rank, process in enumerate(self._ranks) if rank not in self.ends}
            ready = connection.wait([pipe for _, pipe in running.values()], min(left, _EXIT_CHECK_INTERVAL))
            for rank, (process, pipe) in running.items():
                if pipe not in ready and process.exitcode is None:
                    continue
                message = self._receive(rank)
                if isinstance(message, YieldedValue):
                    on_value(rank, message.value)
                    if unanswered == "hung":
                        deadline = time.monotonic() + timeout
                    continue
                self.ends[rank] = message
                if message.kind != "returned":
                    unanswered, deadline = "stopped", min(deadline, time.monotonic() + grace(message))
            if self.board.still(running.keys() - self.ends.keys()):
                break
            if on_check and not self.ends:
                on_check()
        silent = [rank for rank in range(self.world) if rank not in self.ends]
        last_and_paused = {rank: (self.board.last(rank), _is_paused(self._ranks[rank][0].pid)) for rank in silent}
        self._ask_for_stacks(silent)  # which wakes those that were paused
        for rank, (last, paused) in last_and_paused.items():
            self.ends[rank] = End(rank, unanswered, stack=self._stack(rank), last=last, paused=paused)
        return [self.ends[rank] for rank in range(self.world)]

    def kill(self) -> None:
        """Kills every rank that is left, with its children, and waits until they are gone."""
        for process, _ in self._ranks:
            if process.pid and process.exitcode is None:
                self._kill_group(process.pid)
                process.kill()
        for process, pipe in self._ranks:
            if process.pid:
                process.join()
            pipe.close()

    def read_file(self, name: str) -> str:
        """The content of a file in `home`, empty if there is none: RANK.out has what a rank printed."""
        file = self.home / name
        return file.read_text(errors="replace") if file.exists() else ""

    def _receive(self, rank: int) -> End | YieldedValue:
        """The next message of a rank, or how it died without one."""
        process, pipe = self._ranks[rank]
        with suppress(EOFError, OSError):
            if pipe.poll(0.1):  # a message sent before the rank died counts
                message: End | YieldedValue = pickle.loads(pipe.recv_bytes())
                if isinstance(message, End) and message.kind == "raised":
                    self._kill_group(process.pid)  # now: its peers see that it is gone
                return message
        process.join(1)
        code, cause = process.exitcode, self.home / f"{rank}.cause"
        if code == 0 and self.attached and cause.exists():  # without the file, something called os._exit(0)
            return End(rank, "returned")
        self._kill_group(process.pid)
        error = signal_name(-code) if code is not None and code < 0 else f"exit code {code}"
        place = self.board.place(rank)
        return End(
            rank, "died", error, self._stack(rank), code=code or 0, place=place, cause=self.read_file(cause.name)
        )

    def _kill_group(self, pid: int) -> None:
        """Kills the process group that a rank leads, if it is not attached: the rank and its children.

        That of a dead rank is killed as soon as the death is seen, before another process can get its pid.
        """
        if not self.attached:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _ask_for_stacks(self, ranks: list[int]) -> None:
        """Has the ranks write their stacks, and waits for them for a while."""
        if not ranks or not hasattr(faulthandler, "register"):
            return
        for pid in (self._ranks[rank][0].pid for rank in ranks):
            with suppress(ProcessLookupError):
                if _TGKILL:  # to the main thread: if another thread handled the signal, the main thread would run on
                    _TGKILL(pid, pid, _STACK_SIGNAL)
                else:
                    os.kill(pid, _STACK_SIGNAL)
                os.kill(pid, signal.SIGCONT)  # a rank that was stopped wakes to answer, and does so first
        deadline = time.monotonic() + _STACK_TIMEOUT
        while time.monotonic() < deadline and not all(self._stack(rank) for rank in ranks):
            time.sleep(0.01)
        time.sleep(0.1)  # the last answer may be half written

    def _stack(self, rank: int) -> str:
        """What faulthandler wrote of a rank, one paragraph for each thread, without the frames of this file."""
        threads = self.read_file(f"{rank}.stack").split("\n\n")
        own = "\n\n".join(thread for thread in threads if _exit_with_launcher.__name__ not in thread)
        return own.partition(f'  File "{__file__}"')[0]


def _is_paused(pid: int) -> bool:
    """Whether SIGSTOP, or a debugger, holds the process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:  # it is gone, or this is not Linux
        return False
    return state in ("T", "t")


def forkable() -> bool:
    """Whether this process can be forked.

    Thread pools and CUDA do not survive a fork, so a process that has used torch, as a notebook has, cannot. One that
    has only imported torch, as a forked process may have, still has a single thread.
    """
    if sys.platform != "linux" or "torch" not in sys.modules:
        return sys.platform == "linux"
    return len(os.listdir("/proc/self/task")) == 1 and not sys.modules["torch"].cuda.is_initialized()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hides the caller's script, which multiprocessing would have each rank run; ranks get their function by name."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# ---- in the rank ----------------------------------------------------------------------------------------------------


class _RankSetup(NamedTuple):
    rank: int
    home: Path
    attached: bool
    env: dict[str, str]
    threads: int | None
    plugins: list[str]  # names of those that the launcher has imported
    call: bytes  # the pickled name of the function, and its arguments


def _rank_main(setup: _RankSetup, pipe: Connection) -> None:
    """The whole life of a rank: sets the process up, calls the function, sends its values and its end."""
    rank, home = setup.rank, setup.home
    gc.freeze()  # a collection would write to, and so copy, every page that the ranks share
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # until the rank has a way to answer it
    threading.Thread(target=_exit_with_launcher, daemon=True).start()
    os.environ.clear()
    os.environ.update(setup.env)
    if not setup.attached:
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
        if setup.threads:
            import torch

            torch.set_num_threads(setup.threads)
        for name in setup.plugins:
            plugins.load(name)
        function, args = pickle.loads(setup.call)
        value = import_function(function)(*args)
        if isinstance(value, Generator):
            for item in value:
                pipe.send_bytes(pickle.dumps(YieldedValue(item)))
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
    if not setup.attached:
        threading.Event().wait()  # until it is killed


def import_function(name: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _exit_with_launcher() -> None:
    """A thread of the rank: ends the rank when its launcher ends."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)
