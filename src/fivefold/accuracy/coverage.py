"""The coverage of the planner's ranges: how many runs of an unseen source lie inside, and how wide the ranges must be.

coverage().mean            # for the package's sources, each against the range that the other sources give
coverage("my-runs").mean   # for your own runs, against the range that plans print
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from msgspec import structs

from fivefold.accuracy.cases import DATA, PublishedRow, read_rows
from fivefold.accuracy.fit import FIT_STEPS_WITHOUT, predict_unseen
from fivefold.accuracy.fit import by_source as file_of
from fivefold.accuracy.mixture_rows import is_mixture
from fivefold.accuracy.result import Progress, step_counter
from fivefold.accuracy.score import MIN_EXPERTS_ROWS, RowScore, evaluate, line_of
from fivefold.cost.peak_memory import footprint
from fivefold.cost.step import Workload, estimate
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner import error_range
from fivefold.planner.error_range import COVERAGE, IN_WORDS, Band, Bands, Traits, bands, traits
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.support.text import plural

# ---- bands ----------------------------------------------------------------------------------------------------------
# Computes ranges from residuals, so that a case of an unseen source lies inside with a given probability.
#
# Sources are sampled, and rows are sampled within them (a hierarchical conformal prediction: Dunn, Wasserman and
# Ramdas, arXiv 1809.07441; Lee, Barber and Willett, arXiv 2306.06342). So every source has the same weight, however
# many rows it has, and a new source may lie beyond all K known ones: it is one of K + 1.


PRIOR_SOURCES = 12  # a trait's factor is shrunk to 1 with their weight; with less, coverage was lower
SYMMETRY = 0.5  # the widths above and below are shrunk halfway to their mean


class Residual(NamedTuple):
    """One row of a source: the logarithm of measured over predicted."""

    source: str
    error: float
    traits: Traits


def band_of(residuals: Sequence[Residual], share: float = COVERAGE) -> Band:
    """The narrowest band that contains `share` of the cases of a new source."""
    sources = by_source(residuals)
    factors = _factors(residuals)
    flat = Band(-1.0, 1.0, len(sources), len(residuals), factors=factors)
    slow = _mean(residuals, lambda residual: max(0.0, residual.error))
    fast = _mean(residuals, lambda residual: max(0.0, -residual.error))
    total = slow + fast
    if not total:
        return structs.replace(flat, low=0.0, high=0.0)
    up, down = (SYMMETRY + (1 - SYMMETRY) * 2 * side / total for side in (slow, fast))

    def size(row: Residual) -> float:
        return max(row.error / up, -row.error / down) / flat.scale(row.traits)

    sizes = [(size(residual), 1 / len(sources[residual.source])) for residual in residuals]
    reach = quantile(sizes, share * (len(sources) + 1) / len(sources))
    return structs.replace(flat, low=-down * reach, high=up * reach)


def _factors(residuals: Sequence[Residual]) -> dict[str, dict[str, float]]:
    """By trait and level: the mean error of the sources that have the level, relative to the mean error of all."""
    mean = _mean(residuals, lambda residual: abs(residual.error)) or 1.0
    factors: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for residual in residuals for name in residual.traits):
        for level in sorted({residual.traits[name] for residual in residuals if name in residual.traits}):
            of_level = by_source([residual for residual in residuals if residual.traits.get(name) == level])
            means = [fmean(abs(residual.error) for residual in rows) for rows in of_level.values()]
            factor = (sum(means) + PRIOR_SOURCES * mean) / ((len(means) + PRIOR_SOURCES) * mean)
            factors.setdefault(name, {})[level] = factor
    return factors


def by_source(residuals: Sequence[Residual]) -> dict[str, list[Residual]]:
    sources: dict[str, list[Residual]] = {}
    for residual in residuals:
        sources.setdefault(residual.source, []).append(residual)
    return sources


def _mean(residuals: Sequence[Residual], value_of: Callable[[Residual], float]) -> float:
    """The mean over sources of the mean over their rows."""
    return fmean(fmean(map(value_of, rows)) for rows in by_source(residuals).values())


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """The smallest value of (value, weight) pairs with `share` of the weight at or below it."""
    total, below = math.fsum(weight for _, weight in weighted), 0.0
    for value, weight in sorted(weighted):
        below += weight / total
        if below >= share - 1e-9:
            return value
    return max(value for value, _ in weighted)


class Covered(NamedTuple):
    """How many of a source's rows lie inside a band."""

    source: str
    rows: int
    error: float  # mean absolute error of the prediction
    inside: float  # share of its rows, as the next two
    below: float  # faster, or smaller, than the range
    above: float


def cover(source: str, rows: Sequence[Residual], band: Band) -> Covered:
    """A source's rows against a band."""
    outside = [row.error for row in rows if not band.holds(row.error, row.traits)]
    above = sum(error > 0 for error in outside)
    error = fmean(abs(math.expm1(-row.error)) for row in rows)  # predicted / measured - 1, as in `RowScore.error`
    shares = (count / len(rows) for count in (len(rows) - len(outside), len(outside) - above, above))
    return Covered(source, len(rows), error, *shares)


def coverage_of(residuals: Sequence[Residual]) -> list[Covered]:
    """Every source against the band of the other sources."""
    sources = by_source(residuals)
    if len(sources) < 2:
        return []
    return [
        cover(name, rows, band_of([residual for residual in residuals if residual.source != name]))
        for name, rows in sources.items()
    ]


# ---- own steps ------------------------------------------------------------------------------------------------------
# Fivefold's own steps, measured by `fivefold bench`: on one H200, and on CPU ranks of two machines.
#
# They are in `benchmarks/` of the repository, not in the package. No constant was fitted to them: the devices' kernels
# were measured by `fivefold calibrate`.


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CPU_TRAITS = {"system": "CPUs", "device": "known", "model": "dense", "size": "below 10B", "scale": "one node"}


class OwnStep(NamedTuple):
    workload: Workload
    seconds: float
    memory: float


def h200_steps(folder: Path = BENCHMARKS) -> list[OwnStep]:
    """Compiled steps on one H200; empty outside the repository."""
    path = folder / "h200-steps.csv"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")] if path.exists() else []
    measured = []
    for row in csv.DictReader(lines):
        layout = Layout(microbatches=int(row["microbatches"]), recompute=row["recompute"])  # type: ignore[arg-type]
        batch = layout.microbatches * int(row["samples"])
        spec = preset(row["model"], layers=int(row["layers"]))
        workload = Workload(spec, layout, Cluster.parse("H200"), int(row["seq"]), batch)
        measured.append(OwnStep(workload, float(row["seconds"]), float(row["memory"])))
    return measured


def own_times(folder: Path = BENCHMARKS) -> Iterator[Residual]:
    for workload, seconds, _ in h200_steps(folder):
        yield Residual("fivefold, one H200", math.log(seconds / estimate(workload).seconds), traits(workload))
    for path in sorted(folder.glob("scaling-*.json")):
        table = json.loads(path.read_text())
        for row in table["layouts"]:  # with the prediction made then, by a calibration of that machine
            error = math.log(row["seconds"] / row["predicted_seconds"])
            yield Residual(f"fivefold, {table['cores']} CPU cores", error, CPU_TRAITS)


def own_memory(folder: Path = BENCHMARKS) -> Iterator[Residual]:
    for workload, _, memory in h200_steps(folder):
        yield Residual("fivefold, one H200", math.log(memory / footprint(workload).allocated), {})


# ---- coverage -------------------------------------------------------------------------------------------------------


FIRST_SIGHT_FILE = Path(__file__).with_name("first_sight.csv")


@dataclass(frozen=True)
class CoverageResult(Result):
    """How many rows of each source lie in the range that was made without it."""

    time: tuple[Covered, ...]
    memory: tuple[Covered, ...]
    bands: Bands
    residuals: tuple[Residual, ...]  # of time
    own_runs: bool  # of a user's directory, against the ranges that plans print

    @property
    def mean(self) -> float | None:
        """The share of rows inside, averaged over sources."""
        return fmean(source.inside for source in self.time) if self.time else None

    @property
    def memory_mean(self) -> float | None:
        return fmean(source.inside for source in self.memory) if self.memory else None

    def write(self) -> None:
        """Write the ranges to the file that plans read."""
        if self.own_runs:
            raise UserError(
                "the ranges of plans are made from the package's runs; remove --data or --write", "option.conflict"
            )
        if not BENCHMARKS.is_dir():
            raise UserError(
                f"Fivefold's own measured steps are missing: there is no {BENCHMARKS}; run this in the repository",
                "accuracy.data.missing",
            )
        error_range.write(self.bands)

    def to_dict(self) -> dict[str, Any]:
        return {
            "share": COVERAGE,
            "mean": self.mean,
            "sources": [source._asdict() for source in self.time],
            "memory_mean": self.memory_mean,
            "memory": [source._asdict() for source in self.memory],
            "ranges": {
                name: {"low": math.exp(band.low), "high": math.exp(band.high), "factors": band.factors}
                for name, band in (("time", self.bands.time), ("memory", self.bands.memory))
            },
        }

    def blocks(self) -> Iterator[Block]:
        against = "that plans print" if self.own_runs else "that the other sources give"
        if self.time:
            yield _table(f"Step times inside the range {against}", self.time, self.mean)
        if self.memory:
            yield _table(f"Peak memory inside the range {against}", self.memory, self.memory_mean)
        if not self.own_runs:
            yield self._widths()
        yield Text("")
        for what, band in (("step time", self.bands.time), ("peak memory", self.bands.memory)):
            low, high = math.exp(band.low), math.exp(band.high)
            yield Text(
                f"{what} {IN_WORDS}: {low:.2f} to {high:.2f} times the prediction, by {band.rows:,} rows of "
                f"{plural(band.sources, 'source')}"
            )

    def _widths(self) -> Table:
        rows = []
        for name, levels in self.bands.time.factors.items():
            for level, factor in levels.items():
                of_level = [residual for residual in self.residuals if residual.traits.get(name) == level]
                band = self.bands.time
                low, high = (math.exp(side * factor) for side in (band.low, band.high))
                cells = (
                    str(len(by_source(of_level))),
                    f"{len(of_level):,}",
                    f"{factor:.2f}",
                    f"{low:.2f} to {high:.2f}",
                )
                rows.append((name, level, *cells))
        caption = (
            "width of the range, relative to all cases; the widths of a case's traits are multiplied. guess: a device "
            "that has another's constants; calibrated: this code on a GPU that `fivefold calibrate` measured"
        )
        heads = ["trait", "value", ">sources", ">rows", ">width", ">times the prediction"]
        return Table(heads, rows, title="Width of the range, by trait", caption=caption)


def coverage(data: str | Path | None = None, *, progress: Progress = lambda done, total, what: None) -> CoverageResult:
    """Check each source against a range and constants that were made without it.

    With `data`, a directory of runs to which nothing was fitted, the ranges are those that plans print.
    """
    rows = read_rows(Path(data) if data else DATA)
    results = evaluate(rows, tick=step_counter(progress, "predicting", len(rows)))
    if data is not None:
        shipped = bands()
        time, memory = list(_as_shipped(results)), list(_memory(results, {}))
        return CoverageResult(
            _against(time, shipped.time), _against(memory, shipped.memory), shipped, tuple(time), own_runs=True
        )
    first, timed = first_sight(), [result for result in results if result.error is not None]
    runs = [result.run for result in timed if result.run and not is_mixture(result.row)]
    tick = step_counter(progress, "fitting without each source", FIT_STEPS_WITHOUT)
    # No constant is fitted to rows with experts, so they need no fit without their source.
    time = list(_enough(_as_shipped([result for result in timed if is_mixture(result.row)])))
    for run, seconds in predict_unseen(runs, file_of, tick):
        at_first = first.get(_key(run.row))
        run_traits = traits(run.workload) | ({"device": at_first["device"]} if at_first else {})
        if at_first and at_first["seconds"]:
            seconds = float(at_first["seconds"])
        time.append(Residual(run.row.file, math.log((run.seconds or 1.0) / seconds), run_traits))
    time += own_times()
    memory = [*_memory(results, first), *own_memory()]
    by_time, by_memory = coverage_of(time), coverage_of(memory)
    new_bands = Bands(_with_coverage(band_of(time), by_time), _with_coverage(band_of(memory), by_memory))
    return CoverageResult(tuple(by_time), tuple(by_memory), new_bands, tuple(time), own_runs=False)


def _with_coverage(band: Band, sources: Sequence[Covered]) -> Band:
    """The band with the share of rows that it covered, averaged over sources."""
    return structs.replace(band, covered=fmean(source.inside for source in sources))


def first_sight() -> dict[tuple[str, int], dict[str, str]]:
    """By source and line: what was predicted when the source was new. Its entry was written later, with its rows
    known."""
    lines = [line for line in FIRST_SIGHT_FILE.read_text().splitlines() if not line.startswith("#")]
    return {(row["source"], int(row["line"])): row for row in csv.DictReader(lines)}


def _key(row: PublishedRow) -> tuple[str, int]:
    return row.file, row.line


def _as_shipped(results: Sequence[RowScore]) -> Iterator[Residual]:
    for result in results:
        if result.error is not None and result.run:
            yield Residual(line_of(result.row), -math.log1p(result.error), traits(result.run.workload))


def _enough(residuals: Iterable[Residual]) -> Iterator[Residual]:
    """The residuals of sources with at least MIN_EXPERTS_ROWS rows."""
    for rows in by_source(list(residuals)).values():
        if len(rows) >= MIN_EXPERTS_ROWS:
            yield from rows


def _memory(results: Sequence[RowScore], first: dict[tuple[str, int], dict[str, str]]) -> Iterator[Residual]:
    """The residuals of memory. No constant is fitted to memory, so only a source's entry may know its rows; for such
    sources the prediction is that of first sight."""
    for result in results:
        if result.memory_error is None or result.theory is not None or result.run is None:
            continue
        at_first = first.get(_key(result.row), {}).get("memory")
        predicted = float(at_first) if at_first else result.memory or 1.0
        yield Residual(result.row.file, math.log((result.run.memory or 1.0) / predicted), {})


def _against(residuals: Sequence[Residual], band: Band) -> tuple[Covered, ...]:
    return tuple(cover(name, rows, band) for name, rows in by_source(residuals).items())


def _table(title: str, sources: Sequence[Covered], mean: float | None) -> Table:
    rows = []
    for source in sources:
        shares = (source.error, source.inside, source.below, source.above)
        rows.append((source.source, f"{source.rows:,}", *(f"{100 * part:.1f}%" for part in shares)))
    caption = (
        "error: mean absolute error of predictions made without the source; inside: share of rows, which should be "
        f"{COVERAGE:.0%} in the mean of sources; below, above: rows outside the range"
    )
    error = fmean(source.error for source in sources)
    total = ("mean of sources", "", f"{100 * error:.1f}%", f"{100 * (mean or 0.0):.1f}%")
    return Table(["source", ">rows", ">error", ">inside", ">below", ">above"], rows, title, caption, [total])
