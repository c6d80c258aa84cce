"""Runs as constants predict them that have not seen their source, or their accelerator."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fivefold.truth.cases import Measured
from fivefold.truth.fit import Whole, fits_without, predict


class Unseen(NamedTuple):
    run: Measured
    seconds: float  # predicted


def by_source(run: Measured) -> str:
    return run.row.file


def by_accelerator(run: Measured) -> str:
    return run.case.on.accelerator.name


def unseen(
    runs: Sequence[Measured],
    group: Callable[[Measured], str],
    tick: Callable[[], None] = lambda: None,
    whole: Whole | None = None,
) -> Iterator[Unseen]:
    """Every run with a time, under constants that were fitted without its group. `whole`: the fit to all, if known."""
    timed = [run for run in runs if run.seconds]
    if len(set(map(group, timed))) < 2:
        return
    constants = fits_without(whole or Whole.of(timed, tick), timed, group)
    for run in timed:
        if group(run) in constants:
            yield Unseen(run, predict(run, constants[group(run)], exact=True))
