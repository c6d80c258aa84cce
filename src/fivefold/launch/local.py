"""`--nproc N`: N ranks of this machine that train. Clusters use torchrun or Slurm instead.

Our own, because torchrun answers Ctrl-C and a lost rank with pages of its own: here the first rank to fail is named in
one line, the others get a moment to say what they know, and none is left behind.
"""

import os
import runpy
import signal
import socket
import sys
import traceback
import uuid
from collections.abc import Callable
from typing import NoReturn

from fivefold.launch.cores import cores
from fivefold.launch.processes import Processes
from fivefold.launch.world import RESTARTS, RUN
from fivefold.support.errors import PeerLost

INTERRUPTED, TERMINATED = 130, 143  # exit codes after Ctrl-C, and after SIGTERM and a checkpoint
_GRACE = 8.0  # seconds for the others to end after a first failure or Ctrl-C; then they are ended
_SAVING = 600.0  # seconds for a last checkpoint after SIGTERM, if no rank fails


def launch(nproc: int, arguments: list[str], place: Callable[[int], str] = lambda rank: "", restarts: int = 0) -> int:
    """Run `python -m ARGUMENTS` as `nproc` ranks, and up to `restarts` times again if a rank fails.

    `place` says where a rank stands in the layout. SIGTERM is handed on to the ranks, which save before they end. The
    result is 0, the first failure's exit code, 130 after Ctrl-C, or 143 after SIGTERM.
    """
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores() // nproc)
    run, code = os.environ.get(RUN, uuid.uuid4().hex), 0
    for start in range(restarts + 1):
        if start:
            print(f"starting again from the last checkpoint: {start} of {restarts}", file=sys.stderr, flush=True)
        added = {RUN: run, RESTARTS: str(start), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        code = _once(nproc, arguments, place, {"OMP_NUM_THREADS": str(threads), **os.environ, **added}, threads)
        if code in (0, 2, INTERRUPTED, TERMINATED):  # done, bad input, or asked to stop
            break
    return code


def _once(
    nproc: int, arguments: list[str], place: Callable[[int], str], env: dict[str, str], threads: int | None
) -> int:
    ranks = Processes(nproc)
    told: list[int] = []

    def hand_on(number: int, _: object) -> None:
        told.append(number)
        ranks.tell(number)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        ranks.start(f"{__name__}:run_module", arguments, env=env, threads=threads)
        if told:
            ranks.tell(signal.SIGTERM)  # those that it was too early for
        ends = ranks.watch(lambda end: _SAVING if end.code == TERMINATED else _GRACE)
    except KeyboardInterrupt:
        ranks.tell(signal.SIGINT)  # a terminal has told them already; `kill -INT` on this process alone has not
        ranks.watch(lambda end: _GRACE, _GRACE)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
        ranks.kill()
    first = min(ends, key=lambda end: end.blame)
    if first.kind == "returned":
        return 0
    if told or any(end.code == TERMINATED for end in ends):
        return TERMINATED
    silent = [end for end in ends if end.kind == "stopped"]
    for end in silent if first.kind == "stopped" else [first]:
        where = f" ({place(end.rank)})" if place(end.rank) else ""
        print(f"rank {end.rank}{where} {end.how}", file=sys.stderr, flush=True)
    return next((end.code for end in ends if end.code > 0 and end.code != PeerLost.code), 1)


def run_module(rank: int, world: int, arguments: list[str]) -> NoReturn:
    """`python -m ARGUMENTS` in this process."""
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()  # multiprocessing would put a line of its own before it
        sys.exit(1)
    sys.exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
