"""Which step is a spike: a rule on the numbers of the steps before, the same on every rank to the bit."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

_LEAST = 0.05  # of the usual loss: less above it is no spike, however even the losses are


class Numbers(NamedTuple):
    """Of a step."""

    loss: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def usual(recent: Sequence[Numbers]) -> Numbers | None:
    """The medians; None where there are no steps."""
    return Numbers(median(one.loss for one in recent), median(one.norm for one in recent)) if recent else None


def spikes(found: Numbers, recent: Sequence[Numbers], window: int, factor: float) -> bool:
    """Whether a step stands out from those before, of which half a window must be known.

    Its loss is above their median by more than `factor` times their median distance from it, and by more than a
    twentieth of it; or its gradient norm is above `factor` times their median norm.
    """
    if len(recent) < window // 2:
        return False
    middle = usual(recent)
    assert middle is not None
    distance = median(abs(one.loss - middle.loss) for one in recent)
    above = found.loss - middle.loss
    return above > max(factor * distance, _LEAST * abs(middle.loss)) or found.norm > factor * middle.norm > 0
