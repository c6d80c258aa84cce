"""Progress bars, and reading ahead in the background.

Progress is reported to a callback of (bytes done, total bytes); a bar is such a callback.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeAlias, TypeVar

Report: TypeAlias = Callable[[int, int], None]


_SHOWN_STACK = [True]  # a stack; the last entry is in force


def is_shown() -> bool:
    """Whether progress bars, remarks and notes are shown, in addition to results and errors."""
    return _SHOWN_STACK[-1]


@contextmanager
def silence() -> Iterator[None]:
    """Show nothing but results and errors inside the block."""
    _SHOWN_STACK.append(False)
    try:
        yield
    finally:
        _SHOWN_STACK.pop()


def quiet(done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def bar(title: str) -> Iterator[Report]:
    """A progress bar on stderr, so that it is not in output that is piped. It appears with the first report: what is
    refused before has none."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True, force_jupyter=False), disable=not is_shown())
    task = progress.add_task(title, total=None)
    with ExitStack() as stack:

        def report(done: int, total: int) -> None:
            if not progress.live.is_started and is_shown():
                stack.enter_context(progress)
            progress.update(task, completed=done, total=total)

        yield report


@contextmanager
def late_bar(title: str, after: float = 1.0) -> Iterator[Report]:
    """A bar that appears after so many seconds, on a terminal alone."""
    start = time.monotonic()
    report_to: Report = quiet
    with ExitStack() as stack:

        def report(done: int, total: int) -> None:
            nonlocal report_to
            if report_to is quiet and time.monotonic() - start > after and sys.stderr.isatty() and is_shown():
                report_to = stack.enter_context(bar(title))
            report_to(done, total)

        yield report


# ---- prefetch -------------------------------------------------------------------------------------------------------
# Reads ahead in one background thread, in order.
#
# One thread is enough: reading a batch takes some microseconds a sample, and one thread keeps the order of the calls.


T = TypeVar("T")


def prefetch(calls: Iterable[Callable[[], T]], depth: int = 2) -> Generator[T, None, None]:
    """Yields the results of the calls, and makes up to `depth` calls ahead.

    An exception in a call is raised in the place of its result. Closing the generator (or leaving it for the garbage
    collector) drops the calls not yet begun and waits for the one under way, so no thread outlives it.
    """
    if depth < 1:
        raise ValueError(f"depth={depth}: reading ahead needs room for at least 1 result")
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            # The consumer uses one result while `depth` more are computed.
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
