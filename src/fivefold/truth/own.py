"""This code's own steps, as `fivefold bench` measured them: on one H200, and on ranks of two machines with CPUs.

They stand in `benchmarks/` of the repository, not in the package. No constant was fitted to them: the devices'
kernels were measured by `fivefold calibrate`.
"""

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.plan.cost.footprint import footprint
from fivefold.plan.cost.time import Case, estimate
from fivefold.plan.interval import traits
from fivefold.spec.presets import preset
from fivefold.truth.bands import Residual

FOLDER = Path(__file__).parents[3] / "benchmarks"
CPUS = {"system": "CPUs", "device": "known", "model": "dense", "size": "below 10B", "scale": "one node"}


class Step(NamedTuple):
    case: Case
    seconds: float
    memory: float


def h200_steps(folder: Path = FOLDER) -> list[Step]:
    """Compiled steps of one H200; none, where the repository is not at hand."""
    path = folder / "h200-steps.csv"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")] if path.exists() else []
    found = []
    for row in csv.DictReader(lines):
        layout = Layout(microbatches=int(row["microbatches"]), recompute=row["recompute"])  # type: ignore[arg-type]
        batch = layout.microbatches * int(row["samples"])
        spec = preset(row["model"], layers=int(row["layers"]))
        case = Case(spec, layout, Cluster.parse("H200"), int(row["seq"]), batch)
        found.append(Step(case, float(row["seconds"]), float(row["memory"])))
    return found


def own_times(folder: Path = FOLDER) -> Iterator[Residual]:
    for case, seconds, _ in h200_steps(folder):
        yield Residual("fivefold, one H200", math.log(seconds / estimate(case).seconds), traits(case))
    for path in sorted(folder.glob("scaling-*.json")):
        table = json.loads(path.read_text())
        for row in table["layouts"]:  # as predicted when it was measured, by a calibration of that machine
            error = math.log(row["seconds"] / row["predicted_seconds"])
            yield Residual(f"fivefold, {table['cores']} CPU cores", error, CPUS)


def own_memory(folder: Path = FOLDER) -> Iterator[Residual]:
    for case, _, memory in h200_steps(folder):
        yield Residual("fivefold, one H200", math.log(memory / footprint(case).allocated), {})
