"""Make a process slower than the others, for benchmarks: it is stopped for a part of every few milliseconds.

    with slowed(1.5): ...                            # this process takes 1.5 times as long
    python -m benchmarks.slow PID 2                  # so does that one, until this is ended

SIGSTOP and SIGCONT need neither root nor a core of one's own, and any factor can be had. A period of milliseconds is
far shorter than a pipeline stage's pass, so the process behaves as a slower device: every pass takes longer by the
factor, and a message that arrives while it stands waits for a millisecond or two. Time that it spends waiting is no
credit for later. Other ways are coarser: the kernel enforces a cgroup's quota, and switches between two processes that
share a core, at its tick, which is 4 ms at 250 Hz; and the first needs root.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# This file is also run by itself, without the package: nothing but Python's own modules.

RUNNING = 0.002  # seconds between two stops


@contextmanager
def slowed(factor: float) -> Iterator[None]:
    """Of this process, all its threads; by a process of its own, which takes microseconds of every period."""
    if factor == 1:
        yield
        return
    brake = subprocess.Popen([sys.executable, "-I", __file__, str(os.getpid()), str(factor)])
    try:
        yield
    finally:
        brake.terminate()
        brake.wait()


def hold(pid: int, factor: float) -> None:
    """Stop and continue `pid` until it ends, or this process is told to end. It never stays stopped."""
    start, stopped = time.perf_counter(), 0.0
    try:
        while True:
            time.sleep(RUNNING)
            os.kill(pid, signal.SIGSTOP)
            since = time.perf_counter()
            # What was slept too long or too short is made up for in the next period.
            due = (since - start - stopped) * (factor - 1) - stopped
            time.sleep(max(0.0, due))
            os.kill(pid, signal.SIGCONT)
            stopped += time.perf_counter() - since
    except ProcessLookupError:
        return
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _main() -> None:
    def end(number: int, _: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    hold(int(sys.argv[1]), float(sys.argv[2]))


if __name__ == "__main__":
    _main()
