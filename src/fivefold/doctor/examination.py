"""The reports of all ranks together: which nodes there are, what they are called, and what the planner expects."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from fivefold.doctor.reports import RankReport, Ring
from fivefold.hardware.accelerators import Accelerator, find_accelerator
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.launch.statement import ranks_text, short
from fivefold.plan.cost.kernels import Device
from fivefold.plan.cost.links import Wires
from fivefold.support.errors import UserError

T = TypeVar("T")
_NAMED = 4  # nodes, or groups, in one sentence


@dataclass(frozen=True)
class Examination:
    job: Job
    reports: Sequence[RankReport]  # in the order of their ranks

    @cached_property
    def nodes(self) -> dict[str, list[RankReport]]:
        """The ranks of each."""
        found: dict[str, list[RankReport]] = defaultdict(list)
        for report in self.reports:
            found[report.node].append(report)
        return dict(found)

    @cached_property
    def rings(self) -> dict[str, list[Ring]]:
        """The groups of each axis."""
        found: dict[str, list[Ring]] = defaultdict(list)
        for report in self.reports:
            for ring in report.rings:
                found[ring.axis].append(ring)
        return dict(found)

    @cached_property
    def cluster(self) -> Cluster | None:
        return Cluster.read(self.job.run.cluster) if self.job.run.cluster else None

    def who(self, ranks: Iterable[int]) -> str:
        """'node b (ranks 2, 3)' where these are all of its ranks, of several nodes; else 'rank 3 on b'."""
        wanted, parts = set(ranks), []
        for node, reports in self.nodes.items():
            here = [report.rank for report in reports if report.rank in wanted]
            if here and len(here) == len(reports) and len(self.nodes) > 1:
                parts.append(f"node {short(node)} ({ranks_text(here)})")
            elif here:
                parts.append(f"{ranks_text(here)} on {short(node)}")
        return some(parts, str)

    def accelerator(self, report: RankReport) -> Accelerator | None:
        """What the planner knows of a rank's device: of a CPU only what `fivefold calibrate` has measured, and nothing
        where a GPU was planned and this is none."""
        if self.cluster is None:
            return known(report.device)
        found = self.planned(report)
        if found is None or found.is_cpu != report.cpu:
            return None
        return None if found.is_cpu and found.achieved is None else found

    def planned(self, report: RankReport) -> Accelerator | None:
        """The device that run.cluster has in a rank's place."""
        groups = self.cluster.groups if self.cluster else ()
        each = [group.accelerator for group in groups for _ in range(group.world)]
        return each[report.rank] if report.rank < len(each) else None

    def expected_rate(self, report: RankReport) -> float | None:
        """FLOP/s with which the planner counts large matmuls."""
        accelerator = self.accelerator(report)
        try:
            return Device.of(accelerator).rate(report.precision) if accelerator else None
        except UserError:  # a device without that precision
            return None

    def expected_link(self, axis: str) -> float | None:
        """Bytes/s that a rank passes on in a large collective, as the planner counts them."""
        accelerator = self.accelerator(self.reports[0])
        if accelerator is None:
            return None
        return Wires(Device.of(accelerator), max(map(len, self.nodes.values())), self.job.layout).bandwidth(axis)


def known(device: str) -> Accelerator | None:
    """The catalogue's entry of a device, by the name that torch has for it."""
    try:
        return find_accelerator(device)
    except UserError:
        return None


def some(things: Sequence[T], text: Callable[[T], str]) -> str:
    more = f" and {len(things) - _NAMED} more" if len(things) > _NAMED else ""
    return ", ".join(map(text, things[:_NAMED])) + more


def rate_text(value: float) -> str:
    """1.5e9 -> '1.5 GB/s'."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "GB/s"), (1e6, "MB/s")) if value >= size), (1e3, "kB/s"))
    return f"{value / size:.3g} {unit}"


def flops_text(value: float) -> str:
    """9.9e14 -> '990 TFLOP/s'."""
    size, unit = (1e12, "T") if value >= 1e12 else (1e9, "G")
    return f"{value / size:.3g} {unit}FLOP/s"
