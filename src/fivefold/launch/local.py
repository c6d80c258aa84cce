"""`--nproc N`: N ranks of this machine, which live and die together. Clusters use torchrun or Slurm instead.

Our own, because torchrun answers Ctrl-C and a lost rank with pages of its own: here the first rank to fail is named in
one line, the others get a moment to say what they know, and none is left behind. On Linux torch is imported once and
the ranks are forked: eight imports on two cores would take longer than the first twenty steps of a small model.
"""

import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from fivefold.launch.cores import cores
from fivefold.launch.world import HERE
from fivefold.support.errors import PeerLost

_GRACE = 8.0  # seconds for the others to end after a first failure or Ctrl-C; then they are ended
_SAVING = 600.0  # seconds for a last checkpoint after SIGTERM
_LOOK = 0.05
_FORK = sys.platform == "linux"  # elsewhere a fork after numpy or torch is not safe, and every rank imports for itself
# torch imports the last three late, and each rank would for itself: the first step of an optimizer imports dynamo.
_SHARED = ("fivefold.train.run", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")


INTERRUPTED, TERMINATED = 130, 143  # exit codes after Ctrl-C, and after SIGTERM and a checkpoint


def launch(nproc: int, arguments: list[str], place: Callable[[int], str] = lambda rank: "") -> int:
    """Run `python -m ARGUMENTS` as `nproc` ranks; 0, the first failure's exit code, or 130 after Ctrl-C.

    `place` says where a rank stands in the layout. SIGTERM is handed on to the ranks, which save before they end.
    """
    threads = str(max(1, cores() // nproc))
    shared = {"WORLD_SIZE": nproc, HERE: nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    env = {"OMP_NUM_THREADS": threads} | os.environ | {name: str(value) for name, value in shared.items()}
    ranks: list[BaseProcess] = []
    told: list[int] = []

    def hand_on(number: int, _: object) -> None:
        told.append(number)
        _tell(ranks, number)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        _start(ranks, [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)], arguments)
        if told:
            _tell(ranks, signal.SIGTERM)  # those that it was too early for
        if not _failed(ranks):
            return 0
        asked = bool(told) or TERMINATED in [rank.exitcode for rank in ranks]
        silent = _end(ranks, saving=asked)
        codes = [rank.exitcode or 0 for rank in ranks]
        if asked:
            return TERMINATED
        for number in _to_blame(codes, silent):
            where = f" ({place(number)})" if place(number) else ""
            print(f"rank {number}{where} {_how(codes[number], number in silent)}", file=sys.stderr)
        return next((code for code in codes if code > 0 and code != PeerLost.code), 1)
    except KeyboardInterrupt:
        _tell(ranks, signal.SIGINT)  # a terminal has told them already; `kill -INT` on this process alone has not
        _end(ranks)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
        for rank in ranks:
            rank.kill()
            rank.join()


def _tell(ranks: list[BaseProcess], number: int) -> None:
    for rank in ranks:
        if rank.exitcode is None and rank.pid:
            os.kill(rank.pid, number)


def _start(ranks: list[BaseProcess], environments: list[dict[str, str]], arguments: list[str]) -> None:
    if _FORK:
        for name in _SHARED:
            importlib.import_module(name)
        gc.freeze()  # a collection in a rank would write to, and so copy, every page that they share
    context = multiprocessing.get_context("fork" if _FORK else "spawn")
    for env in environments:
        rank = context.Process(target=_live, args=(env, arguments))  # type: ignore[attr-defined]
        rank.start()
        ranks.append(rank)


def _live(env: dict[str, str], arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the rank has a way to answer it
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    if _FORK and "OMP_NUM_THREADS" not in os.environ:  # which torch, loaded by now, would have read
        import torch

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    os.environ.update(env)
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()  # multiprocessing would put a line of its own before it
        sys.exit(1)


def _end_with_the_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _failed(ranks: list[BaseProcess]) -> bool:
    """Waits until all are done, or one has failed."""
    while True:
        codes = [rank.exitcode for rank in ranks]
        if any(codes):
            return True
        if all(code == 0 for code in codes):
            return False
        time.sleep(_LOOK)


def _to_blame(codes: list[int], silent: list[int]) -> list[int]:
    """Of ranks that have ended: one that was ended from outside; else one that failed by itself; else those who were
    silent, for whom the others waited."""
    outside = [rank for rank, code in enumerate(codes) if code < 0 and rank not in silent]
    failed = [rank for rank, code in enumerate(codes) if code > 0 and code != PeerLost.code and rank not in silent]
    return outside[:1] or failed[:1] or silent or [rank for rank, code in enumerate(codes) if code][:1]


def _how(code: int, silent: bool) -> str:
    if silent:
        return f"did not end with the others, and was ended after {_GRACE:.0f} s"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"


def _end(ranks: list[BaseProcess], saving: bool = False) -> list[int]:
    """Wait for the others; those that had to be told. While they are `saving`, and none has failed, they have long."""
    deadline = time.monotonic() + (_SAVING if saving else _GRACE)
    while time.monotonic() < deadline and any(rank.exitcode is None for rank in ranks):
        if saving and any(rank.exitcode not in (None, 0, TERMINATED) for rank in ranks):
            saving, deadline = False, time.monotonic() + _GRACE  # they wait for one that will not come
        time.sleep(_LOOK)
    silent = [number for number, rank in enumerate(ranks) if rank.exitcode is None]
    for number in silent:
        ranks[number].terminate()
    return silent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
