"""A planned run under failures: its steps, how often they are saved, and how long that takes."""

from dataclasses import dataclass
from typing import Any

from fivefold.plan.goodput.expected import Failures, best_steps, expected
from fivefold.plan.goodput.figures import DAY, HOUR
from fivefold.plan.goodput.simulate import RUNS, Simulated, simulated

LOW, HIGH = 0.1, 0.9  # of simulated runs


@dataclass(frozen=True)
class Run:
    steps: int
    step: float  # seconds of one, as planned
    every: int  # steps between saves; 0: one save, at the end
    failures: Failures

    @property
    def work(self) -> float:
        """Seconds that nothing disturbs."""
        return self.steps * self.step

    @property
    def interval(self) -> float:
        return min(self.every or self.steps, self.steps) * self.step

    @property
    def expected(self) -> float:
        return expected(self.work, self.interval, self.failures)

    @property
    def best(self) -> int:
        """Steps between saves, for the shortest run; at most a tenth of it."""
        return best_steps(self.step, self.most, self.failures)

    @property
    def most(self) -> int:
        return max(1, self.steps // 10)

    def simulated(self, runs: int = RUNS, seed: int = 0) -> Simulated | None:
        return simulated(self.work, self.interval, self.failures, runs, seed)

    def days(self, found: Simulated) -> list[float]:
        return [found.quantile(share) / DAY for share in (LOW, 0.5, HIGH)]

    def figures(self) -> dict[str, Any]:
        """The same as plain data, with what 1,000 runs have come to; None where they come to no end."""
        found = self.simulated()
        return {
            "hours_between_failures": self.failures.between / HOUR,
            "checkpoint_every": self.every,
            "days": None if found is None else dict(zip(("p10", "median", "p90"), self.days(found), strict=True)),
            "goodput": None if found is None else self.work / self.expected,
        }


def length(days: float) -> str:
    """115 days, 3.1 hours, 2.0 minutes."""
    if days >= 100:
        return f"{days:,.0f} days"
    units = {"days": 1.0, "hours": 1 / 24, "minutes": 1 / 1440, "seconds": 1 / DAY}
    unit = next((unit for unit, size in units.items() if days >= 2 * size), "seconds")
    return f"{days / units[unit]:.1f} {unit}"
