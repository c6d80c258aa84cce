"""Whether all nodes of a run see its directory, before the first step: all ranks write into its checkpoints."""

import platform
import secrets
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from fivefold.launch.statement import ranks_text, short
from fivefold.parallel.control import Control
from fivefold.support.errors import UserError
from fivefold.support.files import cannot_write, put

_SETTLES = 10.0  # seconds: a network file system may show a new directory late
_NAMED = 8  # nodes


def mark(directory: Path) -> Path:
    """By rank 0: a file that nobody else can have made."""
    path = directory / f".seen-{secrets.token_hex(16)}"
    try:
        put(path, path.name)
    except OSError as error:
        raise cannot_write(path, error) from None
    return path


def check_shared(marked: Path, control: Control) -> None:
    """Collective: all ranks look for rank 0's mark, which is then removed. If one does not see it, all end."""
    blind = "" if _sees(marked, time.monotonic() + _SETTLES) else str(marked.parent.absolute())
    found = control.to_first((platform.node(), blind), tuple[str, str])
    problem = blind_nodes(found)
    if control.rank == 0:
        with suppress(OSError):
            marked.unlink()
    if problem := control.from_first(problem, str):
        raise UserError([problem] if blind or control.rank == 0 else [])


def _sees(path: Path, deadline: float) -> bool:
    while True:
        with suppress(OSError):
            if path.read_text() == path.name:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def blind_nodes(found: list[tuple[str, str]]) -> str:
    """What to say of the nodes that do not see it: of each rank, its node and where it looked in vain."""
    blind = sorted((host, where, rank) for rank, (host, where) in enumerate(found) if where)
    if not blind:
        return ""
    nodes = [
        f"{short(host)} ({ranks_text([rank for _, _, rank in ranks])}) does not see it at {where}"
        for (host, where), ranks in groupby(blind, lambda one: one[:2])
    ]
    more = f"; {len(nodes) - _NAMED} more nodes do not" if len(nodes) > _NAMED else ""
    return (
        f"{short(found[0][0])} (rank 0) has made the run's directory, and {'; '.join(nodes[:_NAMED])}{more}. All ranks "
        "write checkpoints into it: set run.dir to a directory of a file system that all nodes share, or "
        "checkpoint.url to object storage"
    )
