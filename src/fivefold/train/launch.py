"""`--nproc N`: N ranks of this machine, which live and die together. Clusters use torchrun or Slurm instead.

Our own, because torchrun answers Ctrl-C and a lost rank with pages of its own: here the first rank to fail is named in
one line, the others get a moment to say what they know, and none is left behind.
"""

import os
import signal
import socket
import subprocess
import sys
import time

_GRACE = 8.0  # seconds for the others to end after a first failure or Ctrl-C; then they are ended
_LOOK = 0.05


def launch(nproc: int, arguments: list[str]) -> int:
    """Run `python -m ARGUMENTS` as `nproc` ranks; 0, the first failure's exit code, or 130 after Ctrl-C."""
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    shared = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    env = {"OMP_NUM_THREADS": threads} | os.environ | {name: str(value) for name, value in shared.items()}
    ranks = [
        subprocess.Popen([sys.executable, "-m", *arguments], env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(nproc)
    ]
    try:
        first = _first_failure(ranks)
        if first is None:
            return 0
        for silent in _end(ranks):
            print(f"rank {silent} did not end with it, and was ended after {_GRACE:.0f} s", file=sys.stderr)
        code = ranks[first].returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        print(f"rank {first} {how}", file=sys.stderr)
        return code if code > 0 else 1
    except KeyboardInterrupt:
        for rank in ranks:  # a terminal has told them already; `kill -INT` on this process alone has not
            if rank.poll() is None:
                rank.send_signal(signal.SIGINT)
        _end(ranks)
        return 130
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _first_failure(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """Waits until all are done, or one has failed: its number. Deaths by a signal explain failures seen with them."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            return min(failed, key=lambda rank: (codes[rank] or 0) > 0)
        if all(code == 0 for code in codes):
            return None
        time.sleep(_LOOK)


def _end(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    """Those that had to be told."""
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(_LOOK)
    silent = [number for number, rank in enumerate(ranks) if rank.poll() is None]
    for number in silent:
        ranks[number].terminate()
    return silent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
