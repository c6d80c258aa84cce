"""Whether the planner's ranges hold on runs that it has not seen, and how wide they must be for that.

coverage().mean            # of the package's sources, each against the range that the others give
coverage("my-runs").mean   # of one's own runs, against the range that plans print
"""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec import structs

from fivefold.plan import interval
from fivefold.plan.interval import IN_WORDS, SHARE, Band, Bands, bands, traits
from fivefold.report import Block, Result, Table, Text
from fivefold.support.errors import UserError
from fivefold.support.formatting import counted
from fivefold.truth.bands import Covered, Residual, band_of, by_source, coverage_of, covered
from fivefold.truth.cases import DATA, Row, read_rows
from fivefold.truth.fit import STEPS_WITHOUT
from fivefold.truth.mixtures import is_mixture
from fivefold.truth.own import FOLDER, own_memory, own_times
from fivefold.truth.score import FEW, RowScore, evaluate, line_of
from fivefold.truth.truth import Progress, steps
from fivefold.truth.unseen import by_source as file_of
from fivefold.truth.unseen import unseen

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
        return fmean(one.inside for one in self.time) if self.time else None

    @property
    def memory_mean(self) -> float | None:
        return fmean(one.inside for one in self.memory) if self.memory else None

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
            "sources": [one._asdict() for one in self.time],
            "memory_mean": self.memory_mean,
            "memory": [one._asdict() for one in self.memory],
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
                mine = [one for one in self.residuals if one.traits.get(name) == level]
                band = self.bands.time
                low, high = (math.exp(side * factor) for side in (band.low, band.high))
                cells = (str(len(by_source(mine))), f"{len(mine):,}", f"{factor:.2f}", f"{low:.2f} to {high:.2f}")
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
    every = read_rows(Path(data) if data else DATA)
    results = evaluate(every, tick=steps(progress, "predicting", len(every)))
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
        there = traits(run.case) | ({"device": then["device"]} if then else {})
        seconds = float(then["seconds"]) if then and then["seconds"] else seconds
        time.append(Residual(run.row.file, math.log((run.seconds or 1.0) / seconds), there))
    time += own_times()
    memory = [*_memory(results, first), *own_memory()]
    found, held = coverage_of(time), coverage_of(memory)
    made = Bands(_judged(band_of(time), found), _judged(band_of(memory), held))
    return CoverageResult(tuple(found), tuple(held), made, tuple(time), own=False)


def _judged(band: Band, found: Sequence[Covered]) -> Band:
    return structs.replace(band, covered=fmean(one.inside for one in found))


def first_sight() -> dict[tuple[str, int], dict[str, str]]:
    """By source and line: what was predicted when the source was new. Its description came later, and has seen it."""
    lines = [line for line in FIRST_SIGHT.read_text().splitlines() if not line.startswith("#")]
    return {(row["source"], int(row["line"])): row for row in csv.DictReader(lines)}


def _key(row: Row) -> tuple[str, int]:
    return row.file, row.line


def _as_shipped(results: Sequence[RowScore]) -> Iterator[Residual]:
    for result in results:
        if result.error is not None and result.run:
            yield Residual(line_of(result.row), -math.log1p(result.error), traits(result.run.case))


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


def _table(title: str, found: Sequence[Covered], mean: float | None) -> Table:
    rows = []
    for one in found:
        shares = (one.error, one.inside, one.below, one.above)
        rows.append((one.source, f"{one.rows:,}", *(f"{100 * part:.1f}%" for part in shares)))
    caption = (
        "error: mean absolute, of what was predicted unseen; inside: of the rows, should be "
        f"{SHARE:.0%} on the mean of sources; below, above: the range"
    )
    error = fmean(one.error for one in found)
    total = ("mean of sources", "", f"{100 * error:.1f}%", f"{100 * (mean or 0.0):.1f}%")
    return Table(["source", ">rows", ">error", ">inside", ">below", ">above"], rows, title, caption, [total])
