"""Copies what a process prints into its log, from outside: `python tee.py LOG MOST LIVES STACK FROM TO [FROM TO]`.

It reads each file descriptor FROM until its other end is closed, writes what comes to TO, and the first MOST bytes of
all of them to LOG; at the end it adds the content of the file STACK. It ignores the signals that end others and ends
when there is nothing left to copy, so that the last lines of a process that is killed are kept. It keeps the file LIVES
locked as long as it runs. It prints a line on standard output once it has begun.
"""

import fcntl
import os
import selectors
import signal
import sys
from contextlib import suppress


def write_all(handle: int, data: bytes) -> None:
    """Write as much as can be written: a closed terminal or a full disk must not stop the process that is copied."""
    with suppress(OSError):
        while data:
            data = data[os.write(handle, data) :]


def main(log: str, most: str, lives: str, stack: str, *handles: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if lives:
        fcntl.flock(os.open(lives, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_SH)
    out, left = os.open(log, os.O_WRONLY | os.O_APPEND), int(most)
    os.write(1, b"copying\n")
    os.close(1)
    sources = selectors.DefaultSelector()
    for source, target in zip(handles[::2], handles[1::2], strict=True):
        sources.register(int(source), selectors.EVENT_READ, int(target))
    while sources.get_map():
        for key, _ in sources.select():
            data = os.read(key.fd, 1 << 16)
            if not data:
                sources.unregister(key.fd)
                continue
            write_all(key.data, data)
            if left > 0:
                write_all(out, data[:left])
                left -= len(data)
                if left <= 0:
                    write_all(out, f"\n[the log of this start ends here, after {most} bytes]\n".encode())
    with suppress(OSError), open(stack, "rb") as file:
        write_all(out, file.read(1 << 20))


if __name__ == "__main__":
    main(*sys.argv[1:])
