"""Read ahead in one background thread, in order.

One thread and not more: reading a batch is some microseconds a sample, and the order of results is the order of calls
without any bookkeeping.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(calls: Iterable[Callable[[], T]], depth: int = 2) -> Generator[T, None, None]:
    """The results of the calls, of which up to `depth` are made before they are asked for.

    An exception in a call arrives where its result would have. Closing the generator (or leaving it for the garbage
    collector) drops the calls not yet begun and waits for the one under way, so no thread outlives it.
    """
    if depth < 1:
        raise ValueError(f"depth={depth}: reading ahead needs room for at least 1 result")
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            # The consumer is about to hold one result while `depth` more are being made.
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
