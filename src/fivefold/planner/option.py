"""A layout with its time and its memory.

evaluate(workload).seconds  # of the workload's own layout, exactly
"""

from dataclasses import dataclass
from functools import cached_property

from fivefold.cost.peak_memory import USABLE_FRACTION, Footprint, footprint
from fivefold.cost.step import Estimate, Workload, estimate
from fivefold.layout.layout import Layout


@dataclass(frozen=True)
class Option:
    """A layout with its time and its memory."""

    workload: Workload
    estimate: Estimate
    footprint: Footprint

    @property
    def layout(self) -> Layout:
        return self.workload.layout

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.workload.batch * self.workload.seq / self.seconds

    @property
    def device_memory(self) -> int:
        """Bytes of the fullest rank's device."""
        return self.workload.device_memory_of(self.footprint.rank)

    @property
    def limit(self) -> float:
        """Bytes of that device that a plan may fill."""
        return USABLE_FRACTION * self.device_memory

    @cached_property
    def fits(self) -> bool:
        """Whether the fullest rank fits into its device, and so all do."""
        return self.footprint.total <= self.limit


def evaluate(workload: Workload) -> Option:
    """The workload's own layout, exactly."""
    return Option(workload, estimate(workload), footprint(workload))
