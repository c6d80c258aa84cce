"""This machine's cores: how many a rank may use for files beside its step, and work spread over threads."""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from fivefold.launch.world import ranks_here

T = TypeVar("T")
Result = TypeVar("Result")
_MAX_FILE_THREADS = 8  # threads: more do not make a disk faster


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def for_files() -> int:
    """How many threads hash and write files: half of the rank's share of the cores, as the other half trains.

    A rank that is bound to cores of its own (Slurm's tasks are) has its share already.
    """
    share = min(cores(), (os.cpu_count() or 1) // ranks_here())
    return max(1, min(_MAX_FILE_THREADS, share // 2))


def side_by_side(do: Callable[[T], Result], items: Sequence[T], most: int) -> list[Result]:
    """Returns [do(item) for each item], computed by up to `most` threads. After an error no more items are begun, and
    the error is raised.

    Not a pool of concurrent.futures: Ctrl-C, and the end of the process, would wait for all items that are left.
    """
    if min(most, len(items)) <= 1:
        return [do(item) for item in items]
    todo, lock = iter(enumerate(items)), threading.Lock()
    done: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                number, item = next(todo, (None, None))
            if number is None:
                return
            try:
                done[number] = do(item)  # type: ignore[arg-type]
            except BaseException as error:
                errors.append(error)

    workers = [threading.Thread(target=work, name=f"files {n}", daemon=True) for n in range(min(most, len(items)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return [done[number] for number in range(len(items))]


# ---- allocator ------------------------------------------------------------------------------------------------------
# Memory that a step frees stays with the process: the next step needs as much.
#
# Allocators hand freed memory to the operating system, which clears every page before it lends it out again. On CPU
# ranks that was up to a tenth of a step. PyTorch's allocator is mimalloc on Arm, and the C library's elsewhere.


_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt, which glibc alone has
_MAX_MMAP_THRESHOLD = 32 << 20  # bytes: glibc lets no larger block be reused


def keep_freed_memory() -> None:
    """Have the allocators of this process, if torch is not yet imported, and of those that it starts, keep freed
    memory. A user's own settings stay."""
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    wanted = {"MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_MMAP_THRESHOLD_": str(_MAX_MMAP_THRESHOLD)}
    if wanted.keys() & os.environ.keys() or "_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    os.environ |= wanted
    with suppress(OSError, AttributeError, TypeError):  # the variables are read at a process's start, too late for this
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM, -1)  # both must be set: setting one freezes the other at 128 KiB
        library.mallopt(_MMAP, _MAX_MMAP_THRESHOLD)
