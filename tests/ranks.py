"""Run a function on N real gloo ranks, from a test:

    def total(rank: int, world: int, scale: float) -> float:  # at module level: it travels by name
        x = torch.tensor(rank * scale)
        dist.all_reduce(x)
        return x.item()

    def test_total():
        assert run_ranks(4, total, 10.0) == [60.0] * 4

    def test_a_lost_rank_is_named():
        with pytest.raises(RankFailure) as failure:
            run_ranks(4, lose_rank_2, timeout=20, env={"NAME": "value"})
        assert (failure.value.rank, failure.value.kind, failure.value.error) == (2, "died", "SIGKILL")

Ranks are forked from a server that has imported torch and done nothing else: no thread, no OpenMP region, no CUDA. So a
fork takes milliseconds and is safe, whatever the test's own process has computed. The first call starts the server; it
ends with the caller. The ranks of a call are one process group, killed when the call ends, however it ends. A rank that
has returned waits for that, so its sockets outlive the peers that still read from them.

Every rank has one thread, the caller's directory and environment, and the RANK variables of torchrun. Values come back
on the CPU, by value. What ranks print is printed when they are done, rank by rank, for pytest to capture. All ranks
have one hash seed: that a set has another order on each rank does not show here. Linux only (signals, prctl, waitid).
"""

import atexit
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# What tests import, and what torch imports late: without dynamo here, the first AdamW step of 8 ranks takes 11 s.
PRELOAD = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining"]
PRELOAD += ["hypothesis", "pytest"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "GLOO_LOG_LEVEL": "ERROR"}
STACK_SIGNAL = signal.SIGRTMAX  # a rank answers with its stack; SIGUSR1 and SIGUSR2 are left to the code under test
LIBC = ctypes.CDLL(None)
PEER_LEFT = re.compile(r"Connection (closed|reset|refused)|Broken pipe|Socket closed|DistNetworkError")
INNERMOST = re.compile(r"most recent call first.*\n +(File .+)")  # the main thread is the last one listed


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    pid: int
    kind: str  # returned | raised | died (by signal or exit) | hung (at the timeout) | stopped (after a peer's failure)
    error: str = ""  # "ValueError: boom" | "SIGKILL" | "exit code 3"
    stack: str = ""  # the traceback, or where the rank was when it ended
    when: float = 0.0  # time.monotonic() at an exception: processes share that clock
    value: Any = None

    @property
    def where(self) -> str:
        return (INNERMOST.findall(self.stack) or [""])[-1]

    @property
    def secondary(self) -> bool:
        """A peer explains this end: a closed connection, an abort in gloo's thread, a wait inside a collective."""
        waits = self.kind == "hung" and "/torch/distributed/" in self.where
        return waits or self.kind == "stopped" or self.error == "SIGABRT" or bool(PEER_LEFT.search(self.error))

    def __str__(self) -> str:
        how = {"died": "died by", "hung": "hung in", "stopped": "was stopped in"}.get(self.kind, self.kind)
        return f"rank {self.rank} {how} {self.error or self.where}".rstrip()


class RankFailure(Exception):
    """`rank` is the one to blame, `kind`, `error` and `stack` say how it ended, `ranks` are all that ended likewise on
    their own account, and `ends` holds the end of every rank, with the values of those that returned."""

    def __init__(self, ends: list[RankEnd]):
        self.ends = ends
        # Deaths before exceptions: a peer may raise because of a death before the server has seen it.
        kinds = ["died", "raised", "hung", "stopped", "returned"]
        order = sorted(ends, key=lambda e: (e.kind in kinds[3:], e.secondary, kinds.index(e.kind), e.when, e.rank))
        first = order[0]
        self.rank, self.kind, self.error, self.stack = first.rank, first.kind, first.error, first.stack
        self.ranks = [e.rank for e in ends if (e.kind, e.secondary) == (first.kind, first.secondary)]
        whole = [end for end in order if end is first or end.kind == "hung"]
        folded = [str(end).partition("\n")[0][:200] for end in order if end not in whole]
        super().__init__("\n".join([*(f"{end}\n{end.stack}" for end in whole), *folded]))


@dataclass(frozen=True)
class _Call:
    home: Path  # the call's own directory: function and arguments in, values and tracebacks out
    world: int
    timeout: float
    grace: float
    env: dict[str, str]
    cwd: str
    path: list[str]


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    grace: float = 1.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """What `function(rank, world, *args)` returned on each rank, or RankFailure.

    Ranks that run longer than `timeout` seconds have hung; after a first failure the others have `grace` seconds."""
    __tracebackhide__ = True
    name = getattr(function, "__qualname__", "")
    if "<" in name or getattr(function, "__module__", "") == "__main__":
        raise TypeError(f"{name} must be a def at the top level of an imported module: ranks find it by its name")
    with tempfile.TemporaryDirectory(prefix="ranks-") as home:
        torch.save((function, args), f"{home}/call")
        env = {**os.environ, **ONE_THREAD, **LOOPBACK, **(env or {})}
        try:
            ends = _server().ask(_Call(Path(home), world, timeout, grace, env, os.getcwd(), sys.path))
            for rank, end in enumerate(ends):
                if end.kind == "returned":
                    value = torch.load(f"{home}/{rank}.returned", map_location="cpu", weights_only=False)
                    ends[rank] = replace(end, value=value)
        finally:
            for rank in range(world):
                for line in _text(Path(home, f"{rank}.out")).splitlines():
                    print(f"[rank {rank}] {line}")
    if any(end.kind != "returned" for end in ends):
        raise RankFailure(ends)
    return [end.value for end in ends]


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _stack(call: _Call, rank: int) -> str:
    """What faulthandler wrote, down to the worker's first frame."""
    return _text(call.home / f"{rank}.stack").partition(f'  File "{__file__}"')[0]


class _Server:
    """The caller's end of the fork server, which ends when this end is closed."""

    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        boot = f"""import gc, sys; gc.disable()  # imports are a sixth faster without the collector
sys.path[:] = {sys.path!r}; from {__name__} import _serve; _serve({theirs.fileno()})"""
        self.process = subprocess.Popen(
            [sys.executable, "-c", boot],
            env={**os.environ, **ONE_THREAD},  # OpenMP reads them when torch is loaded
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the caller alone
        )
        theirs.close()
        atexit.register(self.close)

    def ask(self, call: _Call) -> list[RankEnd]:
        try:
            self.pipe.send(call)
            return self.pipe.recv()
        except BaseException as error:  # KeyboardInterrupt too: at the closing the server kills the ranks
            self.close()
            if isinstance(error, EOFError | OSError):
                raise RuntimeError(f"the fork server ended with code {self.process.returncode}") from error
            raise

    def close(self) -> None:
        _server.cache_clear()
        self.pipe.close()
        self.process.wait()


_server = functools.cache(_Server)


def _serve(pipe: int) -> NoReturn:
    for name in PRELOAD:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # the collectors of the ranks leave these pages shared
    gc.enable()
    caller = Connection(pipe)
    with suppress(EOFError, ConnectionError):
        while True:
            caller.send(_supervise(caller.recv(), caller))
    os._exit(0)  # torch takes half a second to be dismantled


def _supervise(call: _Call, caller: Connection) -> list[RankEnd]:
    """Fork the ranks, wait for every end, leave no process behind."""
    pids: list[int] = []
    try:
        for rank in range(call.world):
            pids.append(os.fork() or _be_rank(call, rank, caller))
            os.setpgid(pids[-1], pids[0])
        return _watch(call, pids, caller)
    finally:
        if pids:
            os.killpg(pids[0], signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _watch(call: _Call, pids: list[int], caller: Connection) -> list[RankEnd]:
    ends: dict[int, RankEnd] = {}
    kind, deadline = "hung", time.monotonic() + call.timeout
    while len(ends) < call.world and time.monotonic() < deadline:
        if caller.poll(0.005):
            raise EOFError("the caller has closed its end")
        ends |= {rank: end for rank, pid in enumerate(pids) if rank not in ends and (end := _end_of(call, rank, pid))}
        if kind == "hung" and any(end.kind != "returned" for end in ends.values()):
            kind, deadline = "stopped", min(deadline, time.monotonic() + call.grace)
    left = [rank for rank in range(call.world) if rank not in ends]
    for rank in left:
        LIBC.tgkill(pids[rank], pids[rank], STACK_SIGNAL)  # to the main thread, wherever it is
        os.kill(pids[rank], signal.SIGCONT)  # a rank under SIGSTOP wakes to answer, and does so first
    patience = time.monotonic() + 2
    while time.monotonic() < patience and not all(_stack(call, rank) for rank in left):
        time.sleep(0.01)
    time.sleep(0.1 if left else 0)  # the last answer may be half written
    ends |= {rank: RankEnd(rank, pids[rank], kind, stack=_stack(call, rank)) for rank in left}
    return [ends[rank] for rank in range(call.world)]


def _end_of(call: _Call, rank: int, pid: int) -> RankEnd | None:
    gone = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # before the files, which come before an exit
    if (call.home / f"{rank}.returned").exists():
        return RankEnd(rank, pid, "returned")
    if raised := _text(call.home / f"{rank}.raised"):
        return RankEnd(rank, pid, "raised", **json.loads(raised))
    if gone is None:
        return None
    error = f"exit code {gone.si_status}" if gone.si_code == os.CLD_EXITED else signal.Signals(gone.si_status).name
    return RankEnd(rank, pid, "died", error, _stack(call, rank))


def _be_rank(call: _Call, rank: int, caller: Connection) -> NoReturn:
    """The whole life of a forked rank."""
    mine = str(call.home / f"{rank}")
    try:
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: if the server is killed, so are we
        caller.close()
        for stream in (1, 2):
            os.dup2(os.open(f"{mine}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.stdout.reconfigure(line_buffering=True)
        stacks = open(f"{mine}.stack", "w")  # noqa: SIM115 - open as long as the rank lives
        faulthandler.enable(stacks)
        faulthandler.register(STACK_SIGNAL, stacks)
        sys.path[:] = call.path
        os.chdir(call.cwd)
        os.environ.clear()
        os.environ.update(call.env, RANK=f"{rank}", LOCAL_RANK=f"{rank}")
        os.environ.update(WORLD_SIZE=f"{call.world}", LOCAL_WORLD_SIZE=f"{call.world}")
        torch.set_num_threads(1)
        function, args = torch.load(call.home / "call", weights_only=False)
        # A FileStore is as fast as TCPStore here, needs no port, and no rank takes it away by dying. The timeout of
        # the group lies behind that of the call: a hang is to be seen as a hang.
        store = dist.FileStore(str(call.home / "store"), call.world)
        patience = timedelta(seconds=call.timeout + 60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=call.world, timeout=patience)
        if store.add("connected", 1) == call.world:
            store.set("all connected", "")
        store.wait(["all connected"], patience)  # else a rank that fails at once fails peers that still connect
        torch.save(function(rank, call.world, *args), f"{mine}.part")  # by value, unlike multiprocessing's pickler
        os.rename(f"{mine}.part", f"{mine}.returned")
        while True:
            signal.pause()
    except BaseException as error:
        note = {"error": f"{type(error).__name__}: {error}", "stack": traceback.format_exc(), "when": time.monotonic()}
        Path(f"{mine}.part").write_text(json.dumps(note))
        os.rename(f"{mine}.part", f"{mine}.raised")
    finally:
        os._exit(1)
