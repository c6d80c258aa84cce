"""What the server that forks ranks imports first: Ctrl-C ends it without a word, as its launcher says what there is.

The launcher starts it with Ctrl-C held back, so that Python's own handler never has it: torch takes seconds to import,
and a traceback from the midst of that would stand above the launcher's line.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

from fivefold.launch.exits import INTERRUPTED

_LAUNCHER = "FIVEFOLD_FORK_SERVER_OF"  # in the environment: who starts a server


def start(preload: list[str]) -> None:
    """Start the server, unless it runs. Its ranks have these modules."""
    forkserver.set_forkserver_preload([__name__, *preload])
    resource_tracker.ensure_running()  # which the server starts else, and which lets go of Ctrl-C
    with _held_back():
        forkserver.ensure_running()


@contextmanager
def _held_back() -> Iterator[None]:
    """Ctrl-C comes afterwards; for what is started in here, when it says so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_LAUNCHER]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if os.environ.pop(_LAUNCHER, "") == str(os.getppid()):  # this is the server
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as with nohup: then it, and ranks, are not to hear it
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
