"""Memory that a step gives back stays with the process: the next step wants as much.

Allocators hand freed memory to the operating system, which clears every page before it lends it out again. On CPU ranks
that was up to a tenth of a step. PyTorch's allocator is mimalloc on Arm, and the C library's elsewhere.
"""

import ctypes
import os
from contextlib import suppress

_TRIM, _MMAP = -1, -3  # of mallopt, which glibc alone has
_LARGEST = 32 << 20  # bytes: glibc lets no larger block be reused


def keep_freed_memory() -> None:
    """In this process, if torch is not yet imported, and in those that it starts. A user's own settings stay."""
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    wanted = {"MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_MMAP_THRESHOLD_": str(_LARGEST)}
    if wanted.keys() & os.environ.keys() or "_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    os.environ |= wanted
    with suppress(OSError, AttributeError, TypeError):  # read at a process's start; this one has to be told
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM, -1)  # both: the one alone would freeze the other at 128 KiB
        library.mallopt(_MMAP, _LARGEST)
