"""How far off a prediction may be: ranges that should hold in four of five cases.

    step_range(workload)             # Range(low=0.88, high=1.24), as factors of the predicted step time; or None
    step_range(workload).around(10)  # (8.8, 12.4)

`error_range.toml`, beside this file, has the widths. `fivefold accuracy --coverage --write` makes it from runs that the
constants had not seen. Kinds of workloads differ in width: each trait of a workload has a factor.
"""

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, convert, field

from fivefold.cost.step import Workload
from fivefold.hardware import accelerators

BANDS_FILE = Path(__file__).with_suffix(".toml")
COVERAGE = 0.8  # the share of cases in which a range should hold
IN_WORDS = "in 4 of 5 cases"
LARGE_MODEL = 10e9  # parameters
LARGE_CLUSTER = 512  # GPUs

Traits = dict[str, str]  # by the name of a trait: what a workload has of it


class Band(Struct, frozen=True):
    """Logarithms of measured over predicted, between which a workload should lie. Width is times the factors."""

    low: float
    high: float
    sources: int
    rows: int
    covered: float = 0.0  # of the rows of sources left out, each against the band of the others: the mean of sources
    factors: dict[str, dict[str, float]] = field(default_factory=dict)  # by trait and by what a workload has of it

    def scale(self, traits: Traits) -> float:
        return math.prod(self.factors.get(name, {}).get(level, 1.0) for name, level in traits.items())

    def holds(self, error: float, traits: Traits) -> bool:
        return self.low <= error / self.scale(traits) <= self.high

    def range(self, traits: Traits) -> "Range":
        scale = self.scale(traits)
        return Range(math.exp(self.low * scale), math.exp(self.high * scale))


class Bands(Struct, frozen=True):
    time: Band
    memory: Band


class Range(NamedTuple):
    """Factors of what is predicted."""

    low: float
    high: float

    def around(self, value: float) -> tuple[float, float]:
        return self.low * value, self.high * value

    def text(self, value: float) -> str:
        """'8.80 to 12.4', around a value."""
        return " to ".join(f"{end:#.3g}".removesuffix(".") for end in self.around(value))

    def inverse(self, value: float) -> tuple[float, float]:
        """Of what falls as the predicted number rises: a rate, where a time is predicted."""
        return value / self.high, value / self.low


@cache
def bands() -> Bands:
    """The file's."""
    return convert(tomllib.loads(BANDS_FILE.read_text()), Bands)


def traits(workload: Workload) -> Traits:
    """What decides how far off a prediction may be."""
    devices = [group.accelerator for group in workload.cluster.groups]
    unmeasured = [device.name for device in devices if device.achieved is None]
    guess = any(accelerators.source_of(name).startswith("a guess") for name in unmeasured)
    nodes, world = workload.cluster.machines, workload.layout.world
    return {
        "system": _system(workload),
        "device": "guess" if guess else "known",
        "model": "dense" if workload.spec.experts is None else "experts",
        "size": "10B and more" if workload.spec.parameter_count >= LARGE_MODEL else "below 10B",
        "scale": "one node"
        if nodes == 1
        else f"up to {LARGE_CLUSTER} GPUs"
        if world <= LARGE_CLUSTER
        else f"more than {LARGE_CLUSTER} GPUs",
    }


def _system(workload: Workload) -> str:
    if workload.first_device.accelerator.is_cpu:
        return "CPUs"
    if workload.software.pointwise == "fivefold" and workload.first_device.achieved.source.startswith("measured"):
        return "calibrated"  # this code, on a device whose kernels were measured
    return "eager" if workload.software.pointwise == "eager" else "fused"


def step_range(workload: Workload) -> Range | None:
    """Of a step's time. None on a CPU that nobody has calibrated: what such a core reaches is a mere assumption."""
    if workload.first_device.achieved.source.startswith("assumed"):
        return None
    return bands().time.range(traits(workload))


def memory_range() -> Range:
    """Of what is allocated at the peak: few sources publish it, so that all cases have the same."""
    return bands().memory.range({})


def write(fitted: Bands, path: Path = BANDS_FILE) -> None:
    lines = [
        "# Made by `fivefold accuracy --coverage --write`. low, high: logarithms of measured over predicted, between",
        f"# which {COVERAGE:.0%} of the cases of an unseen source should lie; covered: how many did, sources left out;",
        "# factors: how much wider that is, by trait.",
    ]
    for name, band in (("time", fitted.time), ("memory", fitted.memory)):
        lines += ["", f"[{name}]", f"low = {band.low:.4f}", f"high = {band.high:.4f}"]
        lines += [f"sources = {band.sources}", f"rows = {band.rows}", f"covered = {band.covered:.3f}"]
        for trait, levels in band.factors.items():
            lines += ["", f"[{name}.factors.{trait}]"]
            lines += [f'"{level}" = {factor:.3f}' for level, factor in sorted(levels.items())]
    path.write_text("\n".join(lines) + "\n")
    bands.cache_clear()
