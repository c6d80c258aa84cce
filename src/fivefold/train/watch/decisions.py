"""decisions.jsonl of a run: what was decided about steps, so that a start that comes to them again decides the same.

Samples of the data order are used up and never come back, in a rollback neither. So a decision is found by the number
of its batch's first sample, whatever happened to the steps in between, in any layout.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from fivefold.support.files import open_regular
from fivefold.train.metrics import read, to_line, trim
from fivefold.train.records import Decision, Judged, Step

NAME, METRICS = "decisions.jsonl", "metrics.jsonl"
_ALL = 1 << 62  # steps


class Decisions:
    """All that are known of a run, in the order of samples."""

    def __init__(self, found: Iterable[Decision] = ()):
        self.by_first = {one.first: one for one in sorted(found, key=lambda one: one.samples)}

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.by_first.values())

    def add(self, found: Iterable[Decision]) -> None:
        self.by_first = Decisions([*self, *found]).by_first

    def at(self, first: int, samples: int) -> Decision | None:
        """What was decided about the batch of these samples."""
        found = self.by_first.get(first)
        return found if found is not None and found.samples == samples and found.back is None else None

    def onward(self, step: int, samples: int) -> int:
        """The sample with which a run goes on that has made `step` steps and used up `samples`: a later one, if it was
        here that rollbacks came back to."""
        back = [one.samples for one in self if (one.back, one.back_samples) == (step, samples)]
        return max(back, default=samples)

    def undone(self, samples: int) -> bool:
        """Whether a state that had used up so many samples was undone by a rollback to an earlier one."""
        return any(one.back_samples < samples < one.samples for one in self if one.back_samples is not None)

    def near(self, step: int, window: int) -> list[Decision]:
        """Those that changed what was learned, of steps from `window` steps before on: also of later ones, which a
        rollback has undone."""
        return [one for one in self if one.changes and one.step > step - window]


class Known(msgspec.Struct, frozen=True):
    """What the files of a run tell its next start."""

    decisions: list[Decision] = []
    judged: int = 0  # samples up to which steps were judged: those are not judged anew
    damaged: int = 0  # lines that were left out


def known(directory: Path) -> Known:
    """Of a run's directory, before its metrics are cut to the checkpoint that it goes on from. What it knows from the
    metrics stays known, and damaged lines are removed."""
    _, damaged = trim(directory / NAME, _ALL)
    mine = [record for _, record in read(directory / NAME)]
    steps = (record.samples or 0 for _, record in read(directory / METRICS) if isinstance(record, Step))
    before = max((record.samples for record in mine if isinstance(record, Judged)), default=0)
    judged = max(steps, default=0)
    if judged > before:
        write(directory, Judged(samples=judged))
    return Known([one for one in mine if isinstance(one, Decision)], max(judged, before), damaged)


def write(directory: Path, record: Decision | Judged) -> None:
    """On the disk when this returns: a crash must not have another start decide otherwise."""
    with open_regular(directory / NAME, append=True) as file:
        file.write(to_line(record))
        os.fsync(file.fileno())
