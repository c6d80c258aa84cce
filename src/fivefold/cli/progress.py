"""Bars for work that takes a while. They show on a terminal only, and disappear afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bytes_bar(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """For bytes that are read or written: call it with how many were done, and the total where it was not known."""
    with _bar(TextColumn(what), BarColumn(30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total=None: bar.update(task, advance=done, total=total)


@contextmanager
def counting_bar() -> Iterator[Callable[[int, int, str], None]]:
    """For pieces of work: call it with how many are done, of how many, and what comes next."""
    with _bar(BarColumn(30), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _bar(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True, highlight=False)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
