"""Whether the planner's ranges hold on runs that it has not seen, and how wide they must be for that.

coverage().mean            # of the package's sources, each against the range that the others give
coverage("my-runs").mean   # of one's own runs, against the range that plans print
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
from fivefold.accuracy.fit import STEPS_WITHOUT, unseen
from fivefold.accuracy.fit import by_source as file_of
from fivefold.accuracy.result import Progress, steps
from fivefold.accuracy.score import FEW, RowScore, evaluate, line_of
from fivefold.accuracy.spelling import is_mixture
from fivefold.cost.peak_memory import footprint
from fivefold.cost.step import Workload, estimate
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner import interval
from fivefold.planner.interval import IN_WORDS, SHARE, Band, Bands, Traits, bands, traits
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.support.text import counted

# ---- bands ----------------------------------------------------------------------------------------------------------
# Ranges out of residuals, so that a case of a source that nobody has seen lies inside with a given probability.
#
# Sources are drawn, and rows are drawn within them (a hierarchical conformal prediction: Dunn, Wasserman and Ramdas,
# arXiv 1809.07441; Lee, Barber and Willett, arXiv 2306.06342). So every source has the same weight, however many rows
# it has, and a new source may lie beyond all that are known: of K + 1 sources it is one.


PRIOR = 12  # sources: a trait's factor is drawn to 1 as by so many that have none; with fewer, less is held
HALF = 0.5  # slow and fast errors have widths of their own, drawn halfway to each other


class Residual(NamedTuple):
    """One row of a source: the logarithm of measured over predicted."""

    source: str
    error: float
    traits: Traits


def band_of(residuals: Sequence[Residual], share: float = SHARE) -> Band:
    """The narrowest of its form that holds `share` of the cases of a new source."""
    sources = by_source(residuals)
    factors = _factors(residuals)
    flat = Band(-1.0, 1.0, len(sources), len(residuals), factors=factors)
    slow = _mean(residuals, lambda residual: max(0.0, residual.error))
    fast = _mean(residuals, lambda residual: max(0.0, -residual.error))
    total = slow + fast
    if not total:
        return structs.replace(flat, low=0.0, high=0.0)
    up, down = (HALF + (1 - HALF) * 2 * side / total for side in (slow, fast))

    def size(row: Residual) -> float:
        return max(row.error / up, -row.error / down) / flat.scale(row.traits)

    sizes = [(size(residual), 1 / len(sources[residual.source])) for residual in residuals]
    reach = quantile(sizes, share * (len(sources) + 1) / len(sources))
    return structs.replace(flat, low=-down * reach, high=up * reach)


def _factors(residuals: Sequence[Residual]) -> dict[str, dict[str, float]]:
    """By trait: how much larger the errors of a level are than all are, by sources that have it."""
    usual = _mean(residuals, lambda residual: abs(residual.error)) or 1.0
    factors: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for residual in residuals for name in residual.traits):
        for level in sorted({residual.traits[name] for residual in residuals if name in residual.traits}):
            of_level = by_source([residual for residual in residuals if residual.traits.get(name) == level])
            means = [fmean(abs(residual.error) for residual in rows) for rows in of_level.values()]
            factor = (sum(means) + PRIOR * usual) / ((len(means) + PRIOR) * usual)
            factors.setdefault(name, {})[level] = factor
    return factors


def by_source(residuals: Sequence[Residual]) -> dict[str, list[Residual]]:
    sources: dict[str, list[Residual]] = {}
    for residual in residuals:
        sources.setdefault(residual.source, []).append(residual)
    return sources


def _mean(residuals: Sequence[Residual], of: Callable[[Residual], float]) -> float:
    """Over sources, of the mean over their rows."""
    return fmean(fmean(map(of, rows)) for rows in by_source(residuals).values())


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """The least value that has `share` of the weight at or below it; the largest, where there is none."""
    total, below = math.fsum(weight for _, weight in weighted), 0.0
    for value, weight in sorted(weighted):
        below += weight / total
        if below >= share - 1e-9:
            return value
    return max(value for value, _ in weighted)


class Covered(NamedTuple):
    """A source, against the range that the others give."""

    source: str
    rows: int
    error: float  # mean absolute
    inside: float  # share of its rows
    below: float  # the range: faster, or smaller
    above: float


def covered(source: str, rows: Sequence[Residual], band: Band) -> Covered:
    outside = [row.error for row in rows if not band.holds(row.error, row.traits)]
    above = sum(error > 0 for error in outside)
    error = fmean(abs(math.expm1(-row.error)) for row in rows)  # of the prediction, as everywhere
    shares = (count / len(rows) for count in (len(rows) - len(outside), len(outside) - above, above))
    return Covered(source, len(rows), error, *shares)


def coverage_of(residuals: Sequence[Residual]) -> list[Covered]:
    """Every source against the band of the others."""
    sources = by_source(residuals)
    if len(sources) < 2:
        return []
    return [
        covered(name, rows, band_of([residual for residual in residuals if residual.source != name]))
        for name, rows in sources.items()
    ]


# ---- own ------------------------------------------------------------------------------------------------------------
# This code's own steps, as `fivefold bench` measured them: on one H200, and on ranks of two machines with CPUs.
#
# They stand in `benchmarks/` of the repository, not in the package. No constant was fitted to them: the devices'
# kernels were measured by `fivefold calibrate`.


FOLDER = Path(__file__).parents[3] / "benchmarks"
CPUS = {"system": "CPUs", "device": "known", "model": "dense", "size": "below 10B", "scale": "one node"}


class OwnStep(NamedTuple):
    workload: Workload
    seconds: float
    memory: float


def h200_steps(folder: Path = FOLDER) -> list[OwnStep]:
    """Compiled steps of one H200; none, where the repository is not at hand."""
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


def own_times(folder: Path = FOLDER) -> Iterator[Residual]:
    for workload, seconds, _ in h200_steps(folder):
        yield Residual("fivefold, one H200", math.log(seconds / estimate(workload).seconds), traits(workload))
    for path in sorted(folder.glob("scaling-*.json")):
        table = json.loads(path.read_text())
        for row in table["layouts"]:  # as predicted when it was measured, by a calibration of that machine
            error = math.log(row["seconds"] / row["predicted_seconds"])
            yield Residual(f"fivefold, {table['cores']} CPU cores", error, CPUS)


def own_memory(folder: Path = FOLDER) -> Iterator[Residual]:
    for workload, _, memory in h200_steps(folder):
        yield Residual("fivefold, one H200", math.log(memory / footprint(workload).allocated), {})


# ---- coverage -------------------------------------------------------------------------------------------------------


FIRST_SIGHT = Path(__file__).with_name("first_sight.csv")


@dataclass(frozen=True)
class CoverageResult(Result):
    """By source: how many of its rows lie in the range that was made without it."""

    time: tuple[Covered, ...]
    memory: tuple[Covered, ...]
    bands: Bands
    residuals: tuple[Residual, ...]  # of time
    own: bool  # a directory of the user's, against the ranges that plans print

    @property
    def mean(self) -> float | None:
        """Of sources: the share of rows inside."""
        return fmean(source.inside for source in self.time) if self.time else None

    @property
    def memory_mean(self) -> float | None:
        return fmean(source.inside for source in self.memory) if self.memory else None

    def write(self) -> None:
        """Keep the ranges in the file that plans read."""
        if self.own:
            raise UserError("the ranges of plans are made of the package's runs; leave --data out, or --write")
        if not FOLDER.is_dir():
            raise UserError(f"this code's own steps are not at hand: {FOLDER} is missing; run it in the repository")
        interval.write(self.bands)

    def to_dict(self) -> dict[str, Any]:
        return {
            "share": SHARE,
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
        against = "that plans print" if self.own else "that the other sources give"
        if self.time:
            yield _table(f"Step times inside the range {against}", self.time, self.mean)
        if self.memory:
            yield _table(f"Peak memory inside the range {against}", self.memory, self.memory_mean)
        if not self.own:
            yield self._widths()
        yield Text("")
        for what, band in (("step time", self.bands.time), ("peak memory", self.bands.memory)):
            low, high = math.exp(band.low), math.exp(band.high)
            yield Text(
                f"{what} {IN_WORDS}: {low:.2f} to {high:.2f} times the prediction, by {band.rows:,} rows of "
                f"{counted(band.sources, 'source')}"
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
            "width: of the range, relative to all cases; those of a case's traits are multiplied. A guess: a device "
            "that has another's constants; calibrated: this code on a GPU that `fivefold calibrate` measured"
        )
        heads = ["trait", "of a case", ">sources", ">rows", ">width", ">times the prediction"]
        return Table(heads, rows, title="How wide, by kind of case", caption=caption)


def coverage(data: str | Path | None = None, *, progress: Progress = lambda done, total, what: None) -> CoverageResult:
    """Leave out one source after the other: the constants and the range are then made without it.

    With `data`, a directory of runs that nobody has fitted anything to, the ranges are those that plans print.
    """
    rows = read_rows(Path(data) if data else DATA)
    results = evaluate(rows, tick=steps(progress, "predicting", len(rows)))
    if data is not None:
        known = bands()
        time, memory = list(_as_shipped(results)), list(_memory(results, {}))
        return CoverageResult(_against(time, known.time), _against(memory, known.memory), known, tuple(time), own=True)
    first, timed = first_sight(), [result for result in results if result.error is not None]
    runs = [result.run for result in timed if result.run and not is_mixture(result.row)]
    tick = steps(progress, "fitting without each source", STEPS_WITHOUT)
    # No constant is fitted to what experts add.
    time = list(_enough(_as_shipped([result for result in timed if is_mixture(result.row)])))
    for run, seconds in unseen(runs, file_of, tick):
        then = first.get(_key(run.row))
        there = traits(run.workload) | ({"device": then["device"]} if then else {})
        seconds = float(then["seconds"]) if then and then["seconds"] else seconds
        time.append(Residual(run.row.file, math.log((run.seconds or 1.0) / seconds), there))
    time += own_times()
    memory = [*_memory(results, first), *own_memory()]
    by_time, by_memory = coverage_of(time), coverage_of(memory)
    made = Bands(_judged(band_of(time), by_time), _judged(band_of(memory), by_memory))
    return CoverageResult(tuple(by_time), tuple(by_memory), made, tuple(time), own=False)


def _judged(band: Band, sources: Sequence[Covered]) -> Band:
    return structs.replace(band, covered=fmean(source.inside for source in sources))


def first_sight() -> dict[tuple[str, int], dict[str, str]]:
    """By source and line: what was predicted when the source was new. Its description came later, and has seen it."""
    lines = [line for line in FIRST_SIGHT.read_text().splitlines() if not line.startswith("#")]
    return {(row["source"], int(row["line"])): row for row in csv.DictReader(lines)}


def _key(row: PublishedRow) -> tuple[str, int]:
    return row.file, row.line


def _as_shipped(results: Sequence[RowScore]) -> Iterator[Residual]:
    for result in results:
        if result.error is not None and result.run:
            yield Residual(line_of(result.row), -math.log1p(result.error), traits(result.run.workload))


def _enough(residuals: Iterable[Residual]) -> Iterator[Residual]:
    """Of lines that have enough rows to be judged."""
    for rows in by_source(list(residuals)).values():
        yield from rows if len(rows) >= FEW else ()


def _memory(results: Sequence[RowScore], first: dict[tuple[str, int], dict[str, str]]) -> Iterator[Residual]:
    """Nothing is fitted to memory: a description is all that may have seen a source."""
    for result in results:
        if result.memory_error is None or result.theory is not None or result.run is None:
            continue
        then = first.get(_key(result.row), {}).get("memory")
        predicted = float(then) if then else result.memory or 1.0
        yield Residual(result.row.file, math.log((result.run.memory or 1.0) / predicted), {})


def _against(residuals: Sequence[Residual], band: Band) -> tuple[Covered, ...]:
    return tuple(covered(name, rows, band) for name, rows in by_source(residuals).items())


def _table(title: str, sources: Sequence[Covered], mean: float | None) -> Table:
    rows = []
    for source in sources:
        shares = (source.error, source.inside, source.below, source.above)
        rows.append((source.source, f"{source.rows:,}", *(f"{100 * part:.1f}%" for part in shares)))
    caption = (
        "error: mean absolute, of what was predicted unseen; inside: of the rows, should be "
        f"{SHARE:.0%} on the mean of sources; below, above: the range"
    )
    error = fmean(source.error for source in sources)
    total = ("mean of sources", "", f"{100 * error:.1f}%", f"{100 * (mean or 0.0):.1f}%")
    return Table(["source", ">rows", ">error", ">inside", ">below", ">above"], rows, title, caption, [total])
