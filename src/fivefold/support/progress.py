"""Bars of long work, and reading ahead in the background.

Progress of a long job: a callback of (bytes done, total bytes), and a bar as one.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeAlias, TypeVar

Report: TypeAlias = Callable[[int, int], None]


_SHOWN = [True]  # the last: whether bars, remarks and notes are


def shown() -> bool:
    """Whether progress is shown, in addition to what was asked for."""
    return _SHOWN[-1]


@contextmanager
def silenced() -> Iterator[None]:
    """Nothing is shown meanwhile but results and errors."""
    _SHOWN.append(False)
    try:
        yield
    finally:
        _SHOWN.pop()


def quiet(done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def bar(title: str) -> Iterator[Report]:
    """A progress bar on stderr, where it cannot spoil output that is piped on."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown()) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def late_bar(title: str, after: float = 1.0) -> Iterator[Report]:
    """A bar for a person who has waited for so many seconds."""
    start = time.monotonic()
    drawn: Report = quiet
    with ExitStack() as stack:

        def report(done: int, total: int) -> None:
            nonlocal drawn
            if drawn is quiet and time.monotonic() - start > after and sys.stderr.isatty() and shown():
                drawn = stack.enter_context(bar(title))
            drawn(done, total)

        yield report


# ---- prefetch -------------------------------------------------------------------------------------------------------
# Read ahead in one background thread, in order.
#
# One thread and not more: reading a batch is some microseconds a sample, and the order of results is the order of
# calls without any bookkeeping.


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
