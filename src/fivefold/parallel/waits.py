"""How long this rank has stood waiting for others, as far as the host sees it.

    before = waits.seconds()
    ...
    own = time_that_passed - (waits.seconds() - before)

On a GPU the device waits, and the host goes on: there this says little. Waits inside FSDP2 are not seen.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_stood = [0.0]  # the halves of a pair run in turns: one thread at a time adds


def seconds() -> float:
    """Since the process began."""
    return _stood[0]


def stood(wait: Callable[..., T], *args: Any, **options: Any) -> T:
    """`wait(...)`, which returns when others have done their part."""
    start = time.perf_counter()
    try:
        return wait(*args, **options)
    finally:
        _stood[0] += time.perf_counter() - start
