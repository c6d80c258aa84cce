"""Waits for other ranks: how long this rank has spent in them, and how a stack shows one.

    before = waits.seconds()
    numbers = timed_wait(tensor.tolist)                        # on a GPU the host waits for the device, which waits
    own = time_that_passed - (waits.seconds() - before)

On a GPU the device waits for others, and the host goes on until it needs a number: there the seconds say little. Waits
inside FSDP2 are not counted. A rank that hangs here, or inside torch, waits for another rank (`waits_there`).
"""

import linecache
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_waited = [0.0]  # seconds; no lock, as the threads of a joined pair run in turns and only one at a time adds


def waits_there(file: str, line: int) -> bool:
    """Whether a rank whose innermost frame is at this line waits for others, so that they do not wait for it."""
    return "/torch/" in file or "wait(" in linecache.getline(file, line)


def seconds() -> float:
    """The seconds that this process has spent in waits since it began."""
    return _waited[0]


def timed_wait(wait: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call `wait(...)`, which returns when other ranks have done their part, and count its seconds."""
    start = time.perf_counter()
    try:
        return wait(*args, **options)
    finally:
        _waited[0] += time.perf_counter() - start
