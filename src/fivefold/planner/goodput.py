"""A planned run under failures and stragglers: its steps, how often they are saved, and how long that takes."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fivefold.planner.checkpoint_interval import Failures, best_steps, expected_seconds
from fivefold.planner.failure_costs import DAY, HOUR, SLOW_DELAY, SLOW_SHARE, STEP_JITTER
from fivefold.planner.failure_simulation import SIMULATED_RUNS, SimulatedRuns, simulate_runs

LOW_QUANTILE, HIGH_QUANTILE = 0.1, 0.9  # of simulated runs


@dataclass(frozen=True)
class GoodputRun:
    steps: int
    step: float  # seconds of one, as planned
    every: int  # steps between saves; 0: one save, at the end
    failures: Failures

    @property
    def work(self) -> float:
        """Seconds of the run without failures."""
        return self.steps * self.step

    @property
    def interval(self) -> float:
        return min(self.every or self.steps, self.steps) * self.step

    @property
    def expected(self) -> float:
        return expected_seconds(self.work, self.interval, self.failures)

    @property
    def best(self) -> int:
        """Steps between saves, for the shortest run; at most a tenth of it."""
        return best_steps(self.step, self.most, self.failures)

    @property
    def most(self) -> int:
        return max(1, self.steps // 10)

    def simulated(self, runs: int = SIMULATED_RUNS, seed: int = 0) -> SimulatedRuns | None:
        return simulate_runs(self.work, self.interval, self.failures, runs, seed)

    def days(self, runs: SimulatedRuns) -> list[float]:
        return [runs.quantile(share) / DAY for share in (LOW_QUANTILE, 0.5, HIGH_QUANTILE)]

    def figures(self) -> dict[str, Any]:
        """The same as plain data, with the results of 1,000 simulated runs; None if they never end."""
        runs = self.simulated()
        return {
            "hours_between_failures": self.failures.between / HOUR,
            "checkpoint_every": self.every,
            "days": dict(zip(("p10", "median", "p90"), self.days(runs), strict=True)) if runs is not None else None,
            "goodput": None if runs is None else self.work / self.expected,
        }


def days_text(days: float) -> str:
    """115 days, 3.1 hours, 2.0 minutes."""
    if days >= 100:
        return f"{days:,.0f} days"
    units = {"days": 1.0, "hours": 1 / 24, "minutes": 1 / 1440, "seconds": 1 / DAY}
    unit = next((unit for unit, size in units.items() if days >= 2 * size), "seconds")
    return f"{days / units[unit]:.1f} {unit}"


# What it costs that a synchronous step ends with its slowest rank.


class Straggling(NamedTuple):
    """What it costs that a number of ranks wait for each other once per step."""

    ranks: int
    jitter: float  # by how much the slowest rank's step is longer than the mean, on average
    chance: float  # that at least one machine is one of the slow ones
    slow: float  # what that costs a step on average, until the machine is found and left out

    def to_dict(self) -> dict[str, float]:
        return self._asdict()


@cache
def expected_maximum(draws: int) -> float:
    """The expected maximum of so many standard normal draws."""
    if draws == 1:
        return 0.0
    width = 0.005
    at = np.arange(-10.0, 10.0, width) + width / 2
    tails = np.array([math.erfc(abs(x) / math.sqrt(2)) / 2 for x in at])
    below = np.where(at < 0, np.log(tails), np.log1p(-tails))
    all_below = np.exp(draws * below)  # the distribution of the maximum
    return float(np.where(at > 0, 1 - all_below, -all_below).sum() * width)


def expected_straggling(ranks: int, per_machine: int, deviation: float = STEP_JITTER) -> Straggling:
    """`deviation`: of a rank's step time, as a share of its mean; normal, and independent between ranks."""
    chance = -math.expm1(math.ceil(ranks / per_machine) * math.log1p(-SLOW_SHARE))
    return Straggling(ranks, deviation * expected_maximum(ranks), chance, SLOW_DELAY * chance)
