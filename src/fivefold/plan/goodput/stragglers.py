"""What it costs that a synchronous step ends with its slowest rank."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from fivefold.plan.goodput.figures import JITTER, SLOW_SHARE, SLOWER


class Straggling(NamedTuple):
    """Of a number of ranks that wait for each other once a step."""

    ranks: int
    jitter: float  # by how much the slowest rank's step is longer than the mean, on average
    chance: float  # that at least one machine is one of the slow ones
    slow: float  # what that costs a step on average, until the machine is found and left out

    def to_dict(self) -> dict[str, float]:
        return self._asdict()


@cache
def expected_maximum(draws: int) -> float:
    """The mean of the largest of so many standard normal draws."""
    if draws == 1:
        return 0.0
    width = 0.005
    at = np.arange(-10.0, 10.0, width) + width / 2
    tails = np.array([math.erfc(abs(x) / math.sqrt(2)) / 2 for x in at])
    below = np.where(at < 0, np.log(tails), np.log1p(-tails))
    all_below = np.exp(draws * below)  # the distribution of the maximum
    return float(np.where(at > 0, 1 - all_below, -all_below).sum() * width)


def straggling(ranks: int, per_machine: int, deviation: float = JITTER) -> Straggling:
    """`deviation` is that of a rank's step, as a share of its mean; normal, and independent from rank to rank."""
    chance = -math.expm1(math.ceil(ranks / per_machine) * math.log1p(-SLOW_SHARE))
    return Straggling(ranks, deviation * expected_maximum(ranks), chance, SLOWER * chance)
