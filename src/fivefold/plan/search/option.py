"""A layout with its time and its memory.

evaluate(case).seconds      # of the case's own layout, exactly
"""

from dataclasses import dataclass
from functools import cached_property

from fivefold.layout.layout import Layout
from fivefold.plan.cost.footprint import HEADROOM, Footprint, footprint
from fivefold.plan.cost.time import Case, Estimate, estimate


@dataclass(frozen=True)
class Option:
    """A layout with its time and its memory."""

    case: Case
    estimate: Estimate
    footprint: Footprint

    @property
    def layout(self) -> Layout:
        return self.case.layout

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.case.batch * self.case.seq / self.seconds

    @property
    def device_memory(self) -> int:
        """Bytes of the fullest rank's device."""
        return self.case.memory_of(self.footprint.rank)

    @property
    def limit(self) -> float:
        """Bytes of that device that a plan may fill."""
        return HEADROOM * self.device_memory

    @cached_property
    def fits(self) -> bool:
        """Whether the rank that fills its device the most does not overfill it, and so none does."""
        return self.footprint.total <= self.limit


def evaluate(case: Case) -> Option:
    """The case's own layout, exactly."""
    return Option(case, estimate(case), footprint(case))
