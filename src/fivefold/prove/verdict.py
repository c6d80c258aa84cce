"""What the ranks found, and what follows from it."""

import math
from dataclasses import dataclass, field
from fractions import Fraction

from fivefold.prove.compare import Error, worst
from fivefold.train.config import Job
from fivefold.wire import Kind, Traffic, times

_KINDS = ("loss", "norm", "gradient", "parameter")


@dataclass(frozen=True)
class Measured:
    """What one rank found. Pairs are (the layout's, the reference's), one a step."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)  # of all steps


@dataclass(frozen=True)
class Count:
    """What a rank sent in all steps along one axis, by one kind of collective, and what the closed form says."""

    rank: int  # the first that differs, or 0
    expected: Traffic
    counted: Traffic

    @property
    def holds(self) -> bool:
        return self.expected == self.counted

    def __str__(self) -> str:
        e, c = self.expected, self.counted
        return (
            f"rank {self.rank} made {c.calls} {c.kind} calls over {c.axis} with {c.payload} bytes in all steps, and "
            f"the closed form has {e.calls} with {e.payload}"
        )


@dataclass(frozen=True)
class Verdict:
    job: Job
    seconds: float
    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)  # of every comparison, the worst over ranks
    traffic: list[Count] = field(default_factory=list)
    broken: str = ""  # why there is nothing to compare: a rank died, hung or raised
    details: str = ""  # its stack

    @classmethod
    def of(cls, job: Job, measured: list[Measured], expected: list[list[Traffic]], seconds: float) -> "Verdict":
        """`expected` has a step's traffic of each tp rank."""
        compared = zip(*(one.errors for one in measured), strict=True)
        errors = [max(same, key=lambda e: math.inf if math.isnan(e.value) else e.value) for same in compared]
        return cls(job, seconds, measured[0].losses, measured[0].norms, errors, _counts(job, measured, expected))

    def worst(self, what: str) -> Error | None:
        return worst(error for error in self.errors if error.what == what)

    @property
    def problems(self) -> list[str]:
        """What broke; else the failed comparisons, the worst of each kind by name; then the traffic."""
        if self.broken:
            return [self.broken]
        failed = [error for error in self.errors if not error.holds]
        firsts = [e for what in _KINDS if (e := worst(error for error in failed if error.what == what)) is not None]
        more = [f"{count} more comparisons fail"] if (count := len(failed) - len(firsts)) else []
        return [*map(str, firsts), *more, *(str(count) for count in self.traffic if not count.holds)]

    @property
    def passed(self) -> bool:
        return bool(self.errors) and not self.problems


def _counts(job: Job, measured: list[Measured], expected: list[list[Traffic]]) -> list[Count]:
    """For each row the first rank that differs from the closed form, or what all agree on."""
    chosen: dict[tuple[str, Kind], Count] = {}
    for rank, one in enumerate(measured):
        wanted = {row[:2]: times(row, job.train.steps) for row in expected[rank % job.layout.tp]}  # tp varies fastest
        seen = {row[:2]: row for row in one.traffic}
        for key in {**wanted, **seen}:
            nothing = Traffic(*key, 0, 0, Fraction())
            count = Count(rank, wanted.get(key, nothing), seen.get(key, nothing))
            if key not in chosen or (chosen[key].holds and not count.holds):
                chosen[key] = count
    return list(chosen.values())
