"""Progress of a long job: a callback of (bytes done, total bytes), and a bar as one."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

Report: TypeAlias = Callable[[int, int], None]


def quiet(done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def bar(title: str) -> Iterator[Report]:
    """A progress bar on stderr, where it cannot spoil output that is piped on."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def late_bar(title: str, after: float = 1.0) -> Iterator[Report]:
    """A bar for a person who has waited for so many seconds."""
    start = time.monotonic()
    shown: Report = quiet
    with ExitStack() as stack:

        def report(done: int, total: int) -> None:
            nonlocal shown
            if shown is quiet and time.monotonic() - start > after and sys.stderr.isatty():
                shown = stack.enter_context(bar(title))
            shown(done, total)

        yield report
