"""Runs as constants predict them that have not seen their source, or their accelerator."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fivefold.truth.cases import Measured
from fivefold.truth.fit import fits_without, predict


class Unseen(NamedTuple):
    run: Measured
    seconds: float  # predicted


def by_source(run: Measured) -> str:
    return run.row.file


def unseen(
    runs: Sequence[Measured], group: Callable[[Measured], str], tick: Callable[[], None] = lambda: None
) -> Iterator[Unseen]:
    """Every run with a time, under constants that were fitted without its group."""
    timed = [run for run in runs if run.seconds]
    constants = fits_without(timed, group, tick)
    for run in timed:
        if group(run) in constants:
            yield Unseen(run, predict(run, constants[group(run)], exact=True))
