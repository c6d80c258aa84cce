"""For commands that read and write much: a bar, and a directory that is made whole or not at all."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fivefold.errors import UserError
from fivefold.words import bytes_text


@contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives what is to be told of bytes as they are done. On a terminal only, and gone afterwards."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


@contextmanager
def whole_or_nothing(output: Path) -> Iterator[None]:
    """Around the making of a directory: if it fails, what there is of it is gone, and a full disk is a sentence."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is there already, and not empty; give -o a new name")
    try:
        yield
    except BaseException as error:
        shutil.rmtree(output, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        near = next(folder for folder in output.absolute().parents if folder.exists())
        free = bytes_text(shutil.disk_usage(near).free)
        raise UserError(f"cannot write {output}: {error.strerror or error}; {free} are free there") from None
