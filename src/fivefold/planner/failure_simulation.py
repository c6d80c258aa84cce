"""Simulates runs that fail at random, many at a time: how long each takes, and what the time goes into."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fivefold.planner.checkpoint_interval import Failures, expected_seconds

SIMULATED_RUNS = 1000
FAILURES_PER_DRAW = 64  # failures of each run that are drawn together
MAX_FAILURES = 100_000  # of a run, on average, that are still simulated


@dataclass(frozen=True)
class SimulatedRuns:
    """For each run: seconds from the first step to the last save, failures, and seconds lost to restarts."""

    work: float
    saving: float  # seconds that saves block, and the last one takes
    seconds: Any
    failures: Any
    down: Any

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.seconds, share))

    @property
    def goodput(self) -> float:
        """The share of the time that goes into steps that stay, over all runs."""
        return self.work / float(self.seconds.mean())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a run on average, by cause, adding up to its length."""
        total, down = float(self.seconds.mean()), float(self.down.mean())
        lost = total - self.work - self.saving - down
        return {"training": self.work, "saves": self.saving, "steps made again": lost, "failures": down}


@lru_cache(maxsize=64)
def simulate_runs(
    work: float, interval: float, it: Failures, runs: int = SIMULATED_RUNS, seed: int = 0
) -> SimulatedRuns | None:
    """`runs` runs of `work` seconds of steps, saved every `interval`; None if failures leave no progress.

    Time passes from failure to failure, for many runs at once. A failure loses everything since the newest save that
    was written by then.
    """
    interval = min(interval, work)
    if expected_seconds(work, interval, it) > MAX_FAILURES * it.between:
        return None
    draw, cycle = np.random.default_rng(seed), it.cycle(interval)
    left = np.full(runs, work / interval)  # intervals of work that no written save has yet
    seconds, failures, down = np.zeros(runs), np.zeros(runs, dtype=int), np.zeros(runs)
    before = np.full(FAILURES_PER_DRAW, it.down)  # from a failure to the first step
    before[0], running = 0.0, np.arange(runs)
    while running.size:
        lasts = draw.exponential(it.between, (running.size, FAILURES_PER_DRAW))
        gains = np.maximum(0.0, np.floor((lasts - before - it.writing) / cycle))
        needs = before + (left[running, None] - gains.cumsum(1) + gains) * cycle + it.writing
        ends = lasts >= needs
        over = ends.any(1)
        last = np.where(over, ends.argmax(1), FAILURES_PER_DRAW)  # the failure that does not come
        happens = np.arange(FAILURES_PER_DRAW) < last[:, None]
        lasts = np.where(ends, needs, lasts) * (np.arange(FAILURES_PER_DRAW) <= last[:, None])
        seconds[running] += lasts.sum(1)
        down[running] += np.minimum(lasts, before).sum(1)
        failures[running] += happens.sum(1)
        left[running] -= (gains * happens).sum(1)
        running, before[0] = running[~over], it.down
    saving = work / interval * (cycle - interval) + it.writing
    return SimulatedRuns(work, saving, seconds, failures, down)


def standard_error(runs: SimulatedRuns) -> float:
    """The standard error of the mean of `seconds`."""
    return float(runs.seconds.std(ddof=1)) / math.sqrt(len(runs.seconds))
