"""A worker of pytest-xdist, forked from the server that ranks and commands are forked from. An interpreter of its own
would import torch and transformers for itself, which takes longer than to collect all tests.

tests/conftest.py has pytest-xdist start this file instead of an interpreter, with the address of the server and an
interpreter's arguments. It hands its streams on, and ends when the worker does. `commands.executable` has others start
it likewise.
"""

import os
import signal
import sys
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from tests.commands import fork

    address, *words = sys.argv[1:]
    server = {"_forkserver_address": address, "_forkserver_alive_fd": os.pipe()[1], "ensure_running": lambda: None}
    vars(forkserver._forkserver).update(server)
    words = words[words[0] == "-u" :]  # its streams are those that it was given
    # -m MODULE WORDS, or -c CODE
    before = None if words[0] == "-m" else partial(exec, f"{words[-1]}; sys.exit()", {})
    streams = sys.stdin, sys.stdout, sys.stderr
    worker = fork(words[1], words[2:], os.getcwd(), dict(os.environ), before, streams)
    worker.join()
    if worker.exitcode < 0:
        signal.raise_signal(-worker.exitcode)  # whoever started this one sees the same end
    sys.exit(worker.exitcode)
