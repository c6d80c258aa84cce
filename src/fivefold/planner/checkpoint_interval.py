"""The expected length of a run that fails now and then, and the interval between saves that minimises it.

Failures are a Poisson process: one in M seconds on average, at any time. A save blocks the steps for b seconds and
counts after w more, in which training goes on. After a failure, R seconds pass until steps run again, from the newest
save that counts; a failure within them begins them anew. Between two saves that count lie T = interval + b seconds. A
run that goes on must get through T, one that was restarted through T + w, so that of W seconds of work

  E = W/interval M e^((R + w)/M) (e^(T/M) - 1) + M e^(R/M) (e^(w/M) - 1)

exactly; the last term is the wait for the last save. With w = 0 this is Daly's formula (Future Generation Computer
Systems 22, 2006). The best interval depends on b and M alone: (1 - interval/M) e^(T/M) = 1, which is nearly Young's
sqrt(2 b M).
"""

import math
from typing import NamedTuple


class Failures(NamedTuple):
    """How often a job fails, and what failures and saves cost, in seconds."""

    between: float  # two failures of the whole job, on average
    blocked: float  # steps, by a save
    writing: float  # beside the steps, until the save counts
    detect: float
    restart: float
    reload: float

    @property
    def down(self) -> float:
        return self.detect + self.restart + self.reload

    def cycle(self, interval: float) -> float:
        """Seconds from save to save: a save waits until the previous one is written."""
        return max(interval + self.blocked, self.writing)


def expected_seconds(work: float, interval: float, it: Failures) -> float:
    """Expected seconds for `work` seconds of steps; inf if they never end."""
    mean, interval = it.between, min(interval, work)
    try:
        each = mean * math.exp((it.down + it.writing) / mean) * math.expm1(it.cycle(interval) / mean)
        return work / interval * each + mean * math.exp(it.down / mean) * math.expm1(it.writing / mean)
    except OverflowError:
        return math.inf


def young_interval(it: Failures) -> float:
    return math.sqrt(2 * it.blocked * it.between)


def daly_interval(it: Failures) -> float:
    """Daly's higher-order estimate; not valid if a save blocks for longer than 2 M."""
    ratio = it.blocked / (2 * it.between)
    return young_interval(it) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - it.blocked if ratio < 1 else it.between


def best_interval(it: Failures) -> float:
    """Seconds of work between saves, for the least expected time: the root of ln(1 - x) + x + b/M, x = interval/M."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if math.log1p(-middle) + middle + it.blocked / it.between > 0 else (low, middle)
    return max(low * it.between, it.writing - it.blocked)


def best_steps(step: float, max_steps: int, it: Failures) -> int:
    """The same in whole steps, from 1 to `max_steps`, rounded to two digits: the curve is flat there."""
    exact = best_interval(it) / step
    if exact >= max_steps:
        return max(1, max_steps)
    near = {max(1, math.floor(exact)), math.ceil(exact)} if exact < 100 else {round(float(f"{exact:.1e}"))}
    return min(near, key=lambda steps: expected_seconds(max_steps * step, steps * step, it))
