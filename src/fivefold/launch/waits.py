"""Waits for other ranks: how long this rank has spent in them, and what they look like in a stack.

    before = waits.seconds()
    numbers = timed_wait(tensor.tolist)                        # on a GPU the host waits for the device, which waits
    own = time_that_passed - (waits.seconds() - before)

On a GPU the device waits for others, and the host goes on until it needs a number: there the seconds say little. Waits
inside FSDP2 are not seen. A rank that hangs here, or inside torch, hangs for want of another (`waits_there`).
"""

import linecache
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_waited = [0.0]  # the halves of a pair run in turns: one thread at a time adds


def waits_there(file: str, line: int) -> bool:
    """Whether a rank whose innermost frame stands there waits for others: it is not what they wait for."""
    return "/torch/" in file or "wait(" in linecache.getline(file, line)


def seconds() -> float:
    """Since the process began."""
    return _waited[0]


def timed_wait(wait: Callable[..., T], *args: Any, **options: Any) -> T:
    """`wait(...)`, which returns when others have done their part."""
    start = time.perf_counter()
    try:
        return wait(*args, **options)
    finally:
        _waited[0] += time.perf_counter() - start
