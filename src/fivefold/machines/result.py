"""The results of `fivefold calibrate`: a device's measurements and fitted accelerator; the speeds of a job's ranks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import msgspec

from fivefold.cost.block import BlockCost
from fivefold.cost.collective_time import Topology
from fivefold.cost.kernels import Device
from fivefold.cost.software import ON_CPUS
from fivefold.hardware.accelerators import Accelerator
from fivefold.hardware.cluster import Cluster, Group
from fivefold.launch.handshake import ranks_text
from fivefold.layout.layout import Layout
from fivefold.planner.mixed_compare import slow_accelerator
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.support.parsing import toml_value
from fivefold.support.text import plural, printable


@dataclass(frozen=True)
class MeasuredRow:
    """One measurement, and how well the planner's formula reproduces it."""

    what: str
    measured: str
    share: float | None = None  # of the maker's ceiling
    median: float | None = None  # relative error of the formula's times
    worst: float | None = None  # likewise
    note: str = ""


@dataclass(frozen=True)
class CalibrationResult(Result):
    device: str
    accelerator: Accelerator  # with the fitted constants, for the planner
    rows: list[MeasuredRow]
    host: float  # seconds to launch a block's forward pass
    samples: dict[str, Any]  # all timings, for JSON

    def to_dict(self) -> Any:
        return {name: msgspec.to_builtins(getattr(self, name)) for name in ("accelerator", "rows", "host", "samples")}

    def blocks(self) -> Iterator[Block]:
        yield Text(f"{self.device}, as {self.accelerator.name}")
        rows = []
        for row in self.rows:
            shares = ("" if x is None else f"{100 * x:.1f}%" for x in (row.share, row.median, row.worst))
            rows.append([row.what, row.measured, *shares, row.note])
        yield Table(["~", ">measured", ">of ceiling", ">error", ">worst", "~"], rows)


def short(value: float) -> float:
    """The value with four digits; a measurement has no more."""
    return float(f"{value:.4g}") if math.isfinite(value) else value


def to_toml(accelerator: Accelerator, comments: list[str]) -> str:
    """A file that `Cluster.parse("8xFILE.toml")` reads."""
    return "\n".join([*comment_lines(comments), *table_lines(msgspec.to_builtins(accelerator))]) + "\n"


def comment_lines(comments: Sequence[str]) -> list[str]:
    return [f"# {printable(comment)}" for comment in comments]


def table_lines(table: dict[str, Any], name: str = "") -> Iterator[str]:
    """The lines of TOML for a table and the tables inside it; keys that are None are left out."""
    nested = {key: value for key, value in table.items() if isinstance(value, dict)}
    yield from (
        f"{key} = {toml_value(value)}" for key, value in table.items() if key not in nested and value is not None
    )
    for key, values in nested.items():
        inner = f"{name}.{key}".lstrip(".")
        yield from ("", f"[{inner}]", *table_lines(values, inner))


# ---- speeds ---------------------------------------------------------------------------------------------------------
# The relative speed of a job's ranks, which of them are slow, and the cluster that the planner reads.
#
# result = RanksResult(speeds)              # a RankSpeed of each rank
# result.classes                            # ranks that agree within the noise, the fastest first
# speeds_to_toml(result.cluster, [...])     # for plan --cluster, simulate and a job's run.cluster


MIN_TOLERANCE, MAX_TOLERANCE = 0.05, 0.20  # within which ranks have one speed, by the noise of the machine


class RankSpeed(msgspec.Struct, frozen=True):
    """The measurements of one rank while all ranks were at work."""

    rank: int
    node: str
    device: str
    seconds: list[float]  # of a block forward and backward, one figure a round
    accelerator: Accelerator  # fitted, for the planner


class SpeedClass(NamedTuple):
    """Ranks of one speed."""

    ranks: tuple[int, ...]
    seconds: float  # of a block on the median rank
    slower: float  # how many times as long as on the fastest class


@dataclass(frozen=True)
class RanksResult(Result):
    speeds: Sequence[RankSpeed]  # in the order of ranks

    @cached_property
    def tolerance(self) -> float:
        return tolerance([speed.seconds for speed in self.speeds])

    @cached_property
    def classes(self) -> list[SpeedClass]:
        return classes([speed.seconds for speed in self.speeds])

    @cached_property
    def cluster(self) -> Cluster:
        """Groups of neighbouring ranks of one class, in the order of ranks; each has its class's median accelerator."""
        class_of = {rank: number for number, speed_class in enumerate(self.classes) for rank in speed_class.ranks}
        accelerators = [self._median_accelerator(speed_class) for speed_class in self.classes]
        runs = [list(run) for _, run in groupby(self.speeds, key=lambda speed: class_of[speed.rank])]
        return Cluster(tuple(group for run in runs for group in _groups(run, accelerators[class_of[run[0].rank]])))

    def _median_accelerator(self, speed_class: SpeedClass) -> Accelerator:
        ordered = sorted((self.speeds[rank] for rank in speed_class.ranks), key=lambda speed: median(speed.seconds))
        return ordered[(len(ordered) - 1) // 2].accelerator

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": [msgspec.to_builtins(speed) for speed in self.speeds],
            "classes": [speed_class._asdict() for speed_class in self.classes],
            "tolerance": self.tolerance,
            "cluster": self.cluster.to_dict(),
        }

    def blocks(self) -> Iterator[Block]:
        rows = [
            (
                ranks_text(speed_class.ranks),
                self.speeds[speed_class.ranks[0]].device,
                f"{speed_class.seconds * 1e3:.1f}",
                f"{speed_class.slower:.2f}",
            )
            for speed_class in self.classes
        ]
        yield Table(["~ranks", "~device", ">ms a block", ">times as long"], rows)
        yield Text(self.sentence)

    @property
    def sentence(self) -> str:
        """Which ranks are slow, and by how much."""
        world, noise = plural(len(self.speeds), "rank"), f"within {self.tolerance:.0%}, the noise of this run"
        if len(self.classes) == 1:
            return f"{world} at work at once: all have one speed, {noise}"
        slow = [
            f"{speed_class.slower:.2f} times as long on {ranks_text(speed_class.ranks)}"
            for speed_class in self.classes[1:]
        ]
        fast = ranks_text(self.classes[0].ranks)
        return f"{world} at work at once: {fast} the fastest; a block takes {', '.join(slow)} (one speed: {noise})"


def tolerance(rounds: Sequence[Sequence[float]]) -> float:
    """How far two ranks of one speed may lie apart: as far as the rounds of the median rank do, within the bounds."""
    return min(MAX_TOLERANCE, max(MIN_TOLERANCE, median(max(seconds) / min(seconds) - 1 for seconds in rounds)))


def classes(rounds: Sequence[Sequence[float]]) -> list[SpeedClass]:
    """Sorts ranks into classes, the fastest first. A rank is in a class if it is as fast as the fastest rank of the
    class, within the tolerance."""
    limit, seconds = 1 + tolerance(rounds), [median(times) for times in rounds]
    groups: list[list[int]] = []
    for rank in sorted(range(len(seconds)), key=seconds.__getitem__):
        if groups and seconds[rank] <= limit * seconds[groups[-1][0]]:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    medians = [median(seconds[rank] for rank in ranks) for ranks in groups]
    return [SpeedClass(tuple(sorted(ranks)), s, s / medians[0]) for ranks, s in zip(groups, medians, strict=True)]


def at_pace(core: Accelerator, seconds: float, spec: ModelSpec, samples: int, seq: int) -> Accelerator:
    """The core with all its rates scaled by one factor, so that the planner gives a block these `seconds`, forward and
    backward.

    Kernels were timed one after the other, each at other moments of a shared machine. The block was timed on all ranks
    at the same moments, so it compares their speeds best.
    """
    device, software = Device.of(core), ON_CPUS.computing_in("fp32")
    cost = BlockCost(
        spec=spec,
        layer=spec.kinds(spec.layers - 1),
        layout=Layout(),
        device=device,
        topology=Topology(device, 1, Layout()),
        software=software,
        samples=samples,
        seq=seq,
        precision="fp32",
    )
    return slow_accelerator(core, seconds / sum(part.total for part in cost.block))


def _groups(run: Sequence[RankSpeed], device: Accelerator) -> Iterator[Group]:
    """The groups of neighbouring ranks of one speed: consecutive nodes with equally many ranks make one group."""
    ranks_per_node = [len(list(ranks)) for _, ranks in groupby(run, key=lambda speed: speed.node)]
    for gpus, nodes in groupby(ranks_per_node):
        yield Group(len(list(nodes)), gpus, device)


def speeds_to_toml(cluster: Cluster, comments: Sequence[str]) -> str:
    """A file that `Cluster.read` reads back as the same cluster."""
    lines = comment_lines(comments)
    for group in cluster.groups:
        table = msgspec.to_builtins(group)  # with every figure: none is the catalogue's
        lines += ["", "[[cluster.group]]", *table_lines(table, "cluster.group")]
    return "\n".join(lines) + "\n"
