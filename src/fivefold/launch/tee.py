"""Copies what a process prints into its log, from outside: `python tee.py LOG MAX LOCK STACK FROM TO [FROM TO]`.

It reads each file descriptor FROM until its other end is closed, writes what comes to TO, and the first MAX bytes of
all of them to LOG; at the end it adds the content of the file STACK. It ignores the signals that end others and ends
when there is nothing left to copy, so that the last lines of a process that is killed are kept. It keeps the file LOCK
locked as long as it runs. It prints a line on standard output once it has begun.
"""

import fcntl
import os
import selectors
import signal
import sys
from contextlib import suppress

_READ_BYTES, _MAX_STACK_BYTES = 1 << 16, 1 << 20


def write_all(fd: int, data: bytes) -> None:
    """Write as much as can be written: a closed terminal or a full disk must not stop the process that is copied."""
    with suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def main(log: str, max_bytes: str, lock_file: str, stack: str, *fds: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if lock_file:
        fcntl.flock(os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_SH)
    out, left = os.open(log, os.O_WRONLY | os.O_APPEND), int(max_bytes)
    os.write(1, b"copying\n")
    os.close(1)
    sources = selectors.DefaultSelector()
    for source, target in zip(fds[::2], fds[1::2], strict=True):
        sources.register(int(source), selectors.EVENT_READ, int(target))
    while sources.get_map():
        for key, _ in sources.select():
            data = os.read(key.fd, _READ_BYTES)
            if not data:
                sources.unregister(key.fd)
                continue
            write_all(key.data, data)
            if left > 0:
                write_all(out, data[:left])
                left -= len(data)
                if left <= 0:
                    write_all(out, f"\n[the log of this start ends here, after {max_bytes} bytes]\n".encode())
    with suppress(OSError), open(stack, "rb") as file:
        write_all(out, file.read(_MAX_STACK_BYTES))


if __name__ == "__main__":
    main(*sys.argv[1:])
