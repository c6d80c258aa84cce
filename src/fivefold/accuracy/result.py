"""The result of `fivefold accuracy`: errors by source, sweeps, and rows; as tables, as a picture and as JSON."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from fivefold.accuracy.cases import DATA, MeasuredRun, PublishedRow, measured, read_rows, source_of
from fivefold.accuracy.fit import (
    FIT_STEPS,
    FIT_STEPS_WITHOUT,
    FITTED_CONSTANTS,
    Constants,
    FullFit,
    Unseen,
    by_accelerator,
    by_source,
    fit,
    predict_unseen,
)
from fivefold.accuracy.mixture_rows import is_mixture
from fivefold.accuracy.score import (
    CONTRADICTIONS,
    RowScore,
    Score,
    SweepChoice,
    choices,
    evaluate,
    median_regret,
    scores,
)
from fivefold.accuracy.sources import ANY, SOURCES
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.render.chart import TOP, Plot, sheet
from fivefold.render.scene import (
    COLOURS,
    FAINT,
    GREY,
    INK,
    LABEL,
    MARGIN,
    PALE,
    SHAPES,
    SMALL,
    WIDTH,
    Area,
    Curve,
    Mark,
    Scene,
    TextMark,
    cut,
)
from fivefold.support.errors import UserError

# ---- picture --------------------------------------------------------------------------------------------------------
# A scatter plot of predicted against measured step times: a mark for each run, the diagonal, and bands around it.


HEIGHT, PLOT_LEFT, PLOT_WIDTH = 880.0, 128.0, 690.0
ERROR_BANDS = (0.25, 0.10)  # relative errors on either side of the diagonal; the wider band is painted first
BAND_SHADES = (FAINT, PALE)


def scatter(results: Sequence[RowScore]) -> Scene:
    """A mark on the diagonal is a prediction without error; sources have a colour and a shape each."""
    points = [
        (result.row.file, result.run.seconds, result.seconds)
        for result in results
        if result.error is not None and result.run and result.run.seconds and result.seconds
    ]
    spread = [value for _, *both in points for value in both] or [0.1, 10]
    low, high = 10.0 ** math.floor(math.log10(min(spread))), 10.0 ** math.ceil(math.log10(max(spread)))
    near = sum(abs(predicted / seconds - 1) <= ERROR_BANDS[-1] for _, seconds, predicted in points)
    share = f"; {near / len(points):.0%} of them within 10%" if points else ""
    files = list(dict.fromkeys(name for name, _, _ in points))
    subtitle = f"{len(points)} measured runs of {len(files)} sources{share}"
    scene = sheet("Step times: predicted against measured", subtitle, HEIGHT, "predicted against measured step times")
    plot = Plot(scene, PLOT_LEFT, TOP, PLOT_WIDTH, HEIGHT - TOP - 70, (low, low), (high, high), log=True)
    for band, shade in zip(ERROR_BANDS, BAND_SHADES, strict=True):
        scene.shapes.append(_band(plot, band, shade))
    plot.axis_x("measured, seconds per step", "{:g}".format)
    plot.axis_y("predicted, seconds per step", "{:g}".format)
    scene.shapes.append(Curve(((plot.x(low), plot.y(low)), (plot.x(high), plot.y(high))), GREY, 1.5))
    looks = {name: (COLOURS[n % len(COLOURS)], n // len(COLOURS) % SHAPES) for n, name in enumerate(files)}
    for name, seconds, predicted in points:
        colour, shape = looks[name]
        scene.shapes.append(Mark(plot.x(seconds), plot.y(predicted), 4.2, colour, shape, 0.6))
    _legend(scene, {name: sum(source == name for source, _, _ in points) for name in files}, looks)
    return scene


def _band(plot: Plot, share: float, shade: str) -> Area:
    """The area of predictions between 1/(1+share) and 1+share times the measured time."""
    low, high, factor = plot.low[0], plot.high[0], 1 + share
    above = ((low, low * factor), (high / factor, high))
    below = ((high, high / factor), (low * factor, low))
    corners = ((low, low), *above, (high, high), *below)
    return Area(tuple((plot.x(x), plot.y(y)) for x, y in corners), shade, shade)


def _legend(scene: Scene, counts: dict[str, int], looks: dict[str, tuple[str, int]]) -> None:
    """Draw the legend right of the plot: the bands, the diagonal, then the sources with their numbers of runs. `looks`
    has the colour and the shape of a source's marks."""
    x, y = PLOT_LEFT + PLOT_WIDTH + 44, TOP + 10
    width = WIDTH - MARGIN / 2 - x
    for share, shade in zip(reversed(ERROR_BANDS), reversed(BAND_SHADES), strict=True):
        scene.shapes += [
            Area(((x, y - 7), (x, y - 7), (x + 26, y - 7), (x + 26, y + 7), (x, y + 7)), shade, shade),
            TextMark(x + 36, y, f"within {share:.0%}", LABEL),
        ]
        y += 26
    scene.shapes += [Curve(((x, y), (x + 26, y)), GREY, 1.5), TextMark(x + 36, y, "no error", LABEL)]
    scene.shapes.append(TextMark(x, y + 36, "source (runs)", LABEL, bold=True))
    y += 62
    step = min(24.0, (HEIGHT - 40 - y) / max(1, len(counts)))
    size = min(SMALL, 0.82 * step)
    for number, (name, count) in enumerate(counts.items()):
        colour, shape = looks[name]
        words = cut(f"{name} ({count})", size, width - 26)
        scene.shapes += [
            Mark(x + 8, y + number * step, 5, colour, shape),
            TextMark(x + 26, y + number * step, words, size, fill=INK),
        ]


# ---- result ---------------------------------------------------------------------------------------------------------


_MAX_LINES = 5  # line numbers of refused rows that are listed per reason


@dataclass(frozen=True)
class AccuracyResult(Result):
    results: tuple[RowScore, ...]
    left_out: dict[str, float]  # by source: the mean error with constants that were fitted without it
    shown_source: str  # the source whose rows are shown
    constants: Constants | None  # the fitted ones, if they were fitted
    left_out_devices: dict[str, float] = field(default_factory=dict)  # by accelerator, likewise
    own_runs: bool = False  # of a user's directory: the tables show which software was assumed

    @cached_property
    def scores(self) -> list[Score]:
        return scores(self.results)

    @cached_property
    def sweeps(self) -> list[SweepChoice]:
        return choices(self.results)

    @property
    def mean_mape(self) -> float | None:
        """The mean of the sources' mean errors."""
        return self._mean_of("mape", experts=False)

    @property
    def experts_mape(self) -> float | None:
        """The mean for models with experts, over sources that have at least five such rows."""
        return self._mean_of("mape", experts=True)

    def _mean_of(self, what: str, *, experts: bool) -> float | None:
        return _mean(
            [getattr(score, what) or 0.0 for score in self.scores if score.judged and score.experts is experts]
        )

    def to_dict(self) -> dict[str, Any]:
        left = self.left_out
        return {
            "sources": {
                score.source: score.to_dict() | ({"left_out_mape": left[score.source]} if score.source in left else {})
                for score in self.scores
            },
            "mean_mape": self.mean_mape,
            "left_out_by_accelerator": self.left_out_devices,
            "experts_mape": self.experts_mape,
            "sweeps": {
                "count": len(self.sweeps),
                "median_regret": median_regret(self.sweeps),
                "out_of_memory": sum(choice.out_of_memory for choice in self.sweeps),
            },
            "software": [
                dict(zip(("source", "software", "assumed", "why"), row, strict=True)) for row in self.software
            ],
            "rows": [result.to_dict() for result in self.results],
        }

    def scene(self) -> Scene:
        return scatter(self.results)

    def blocks(self) -> Iterator[Block]:
        if self.constants:
            rows = [
                (fitted.where, fitted.name, f"{fitted.guess:.4g}", f"{self.constants.value(fitted):.4g}")
                for fitted in FITTED_CONSTANTS
            ]
            caption = "guess: from kernel benchmarks and papers"
            yield Table(["device", "constant", ">guess", ">fitted"], rows, title="Constants", caption=caption)
        yield self._errors()
        if self.left_out_devices:
            devices = [(name, _percent(error)) for name, error in self.left_out_devices.items()]
            caption = "mean error of its sources, with constants fitted without any of its runs"
            yield Table(
                ["accelerator", ">left out"], devices, title="Accelerators left out of the fit", caption=caption
            )
        yield from self._memory()
        if self.own_runs:
            yield from self._software()
        yield Text("")
        yield from self._sentences()
        if self.shown_source:
            yield _rows([result for result in self.results if result.row.file == self.shown_source])
        refused: dict[tuple[str, str], list[int]] = {}
        for result in self.results:
            if result.refused:
                refused.setdefault((result.row.file, result.refused), []).append(result.row.line)
        for (source, reason), lines in refused.items():
            more = " ..." if len(lines) > _MAX_LINES else ""
            where = f" (line {', '.join(map(str, lines[:_MAX_LINES]))}{more})" if self.own_runs else ""
            yield Text(f"refused: {len(lines)} of {source}{where}: {reason}")

    def _errors(self) -> Table:
        left = self.left_out
        heads = ["source", ">rows", ">timed", ">error", ">median", ">bias", ">null model", ">worst"]
        rows = []
        for score in self.scores:
            cells = [score.source, str(score.rows), str(score.timed), _percent(score.mape), _percent(score.median_ape)]
            worst = score.worst.error if score.worst else None
            cells += [_percent(score.bias, signed=True), _percent(score.null_mape), _percent(worst, signed=True)]
            rows.append(cells + ([_percent(left.get(score.source))] if left else []))
        totals = []
        for experts, name in ((False, "mean of sources"), (True, "mean of sources, experts")):
            if (error := self._mean_of("mape", experts=experts)) is not None:
                null = _percent(self._mean_of("null_mape", experts=experts))
                without = None if experts else _mean([*left.values()])
                totals.append([name, "", "", _percent(error), "", "", null, ""])
                totals[-1] += [_percent(without)] if left else []
        return Table(
            heads + ([">left out"] if left else []),
            rows,
            title="The planner against measured runs",
            caption="timed: rows with a measured time; error: mean absolute error of the step time; null model: the "
            "error of the best single hardware utilisation per source; models with experts have lines of their own, "
            "which count if they have five rows or more"
            + ("; left out: the error with constants fitted without the source" if left else ""),
            totals=totals,
        )

    @cached_property
    def software(self) -> list[tuple[str, str, bool, str]]:
        """(source, software of its rows, whether that is a guess, the reason), without repeats."""
        rows = ((result.row.file, source_of(result.row)) for result in self.results if result.run)
        described = ((file, source.software.name, source.assumed, source.why) for file, source in rows)
        return list(dict.fromkeys(described))

    def _software(self) -> Iterator[Block]:
        rows = [(file, name, "assumed" if guess else "described", why) for file, name, guess, why in self.software]
        caption = "the column `system`, or NAME.toml next to NAME.csv, says which software a run used"
        if all(result.row.workload for result in self.results):
            caption = "a report of `fivefold checkup` is of Fivefold's own runs"
        yield Table(["source", "~software", "", "~by"], rows, title="The software of these runs", caption=caption)

    def _memory(self) -> Iterator[Table]:
        """The table of sources that publish memory or failures, or have rows that cannot be predicted."""
        rows = [
            [
                score.source,
                str(score.refused or ""),
                f"{_percent(score.memory_mape)} ({score.memory_rows})" if score.memory_rows else "",
                *map(_percent, (score.oom_right, score.oom_precision, score.oom_recall)),
            ]
            for score in self.scores
            if score.refused or score.memory_rows or score.oom_right is not None
        ]
        heads = ["source", ">refused", ">memory error (rows)", ">OOM right", ">precision", ">recall"]
        caption = "refused: rows that cannot be predicted; OOM right: rows whose fit is predicted correctly"
        if rows:
            yield Table(heads, rows, title="Memory, and runs that ran out of it (OOM)", caption=caption)

    def _sentences(self) -> Iterator[Text]:
        if self.sweeps:
            failed = sum(choice.out_of_memory for choice in self.sweeps)
            finite = [choice.regret for choice in self.sweeps if not choice.out_of_memory]
            yield Text(
                f"sweeps: {len(self.sweeps)}; the planner's choice is slower than the best measured layout by "
                f"{_percent(median_regret(self.sweeps))} in the median and {_percent(_mean(finite))} in the mean; "
                f"{failed} of its choices ran out of memory"
            )
        ran = [result for result in self.results if result.row.status == "ok" and result.fits is not None]
        wrong = (result for result in ran if not result.fits and not (result.run and result.run.memory))
        if alarms := Counter(result.row.file for result in wrong):
            counts = ", ".join(f"{count} of {name}" for name, count in alarms.items())
            do = "does" if alarms.total() == 1 else "do"
            yield Text(f"of {len(ran)} runs that ran, the planner says that {alarms.total()} {do} not fit: {counts}")


@dataclass(frozen=True)
class SourceList(Result):
    """What is assumed about each source where its rows do not say."""

    def to_dict(self) -> list[dict[str, Any]]:
        return [
            {"source": source.match or "any other", "software": source.software.name}
            | {name: getattr(source, name) for name in ("zero", "sp", "recompute", "why")}
            for source in (*SOURCES, ANY)
        ]

    def blocks(self) -> Iterator[Block]:
        heads = ["~source", "~software", ">zero", "sp", "recompute", "~why"]
        rows = [list(map(str, row.values())) for row in self.to_dict()]
        yield Table(heads, rows, title="What is assumed about each source where its rows do not say")


def _rows(results: list[RowScore]) -> Table:
    # Predicted memory is shown only if memory was measured, or ran out.
    with_memory = any(result.row.status == "oom" or (result.run and result.run.memory) for result in results)
    rows = []
    for result in results:
        line, run = str(result.row.line), result.run
        if run is None:
            rows.append([line, result.row.text("model"), result.refused or "computed, not measured"])
            continue
        measured = f"{run.seconds:.4g} s" if run.seconds else ""
        if result.row.status == "oom":
            measured = "out of memory"
        predicted = f"{result.seconds:.4g} s" if result.seconds else ""
        cells = [line, run.workload.spec.name, str(run.workload.layout).partition(",split=")[0], measured, predicted]
        cells.append(_percent(result.error, signed=True))
        if with_memory:
            cells += [_gigabytes(run.memory), _gigabytes(result.memory), "yes" if result.fits else "no"]
        rows.append(cells)
    memory_heads = [">memory", ">predicted", ">fits"] if with_memory else []
    return Table([">line", "model", "~layout", ">measured", ">predicted", ">error", *memory_heads], rows, title="Rows")


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(value: float | None, *, signed: bool = False) -> str:
    return "" if value is None else f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def _gigabytes(size: float | None) -> str:
    return f"{size / 1e9:.1f} GB" if size else ""


# ---- accuracy -------------------------------------------------------------------------------------------------------
# Compares the planner with published, measured runs.
#
# planner_accuracy(rows="llama3").scores[0].mape


Progress = Callable[[int, int, str], None]  # steps so far, all steps, what is done


def planner_accuracy(
    data: str | Path | None = None,
    *,
    rows: str = "",
    leave_out: bool = False,
    refit: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> AccuracyResult:
    """Predict every run of a directory of CSV files, by default of those that come with the package.

        >>> result = ff.planner_accuracy(rows="llama3")

    `data` is that directory, or the JSON of `fivefold checkup`. `rows` names one source, whose rows are then shown;
    `leave_out` also predicts each source, and each accelerator, with constants that were fitted without it (minutes);
    `refit` fits the constants to the runs and predicts with them. `progress` is called with the number of steps done,
    their total, and what is being done.
    """
    published = read_rows(Path(data) if data else DATA)
    files = list(dict.fromkeys(row.file for row in published))
    if rows and rows not in files:
        raise UserError(f"unknown source {rows!r}; there are {', '.join(files)}", "accuracy.source.unknown")
    if rows and not refit:
        published = [row for row in published if row.file == rows]
    constants = fit(_fittable_runs(published), step_counter(progress, "fitting", FIT_STEPS)) if refit else None
    left, devices = _errors_left_out(published, progress) if leave_out else ({}, {})
    results = evaluate(published, constants, tick=step_counter(progress, "predicting", len(published)))
    return AccuracyResult(tuple(results), left, rows, constants, own_runs=data is not None, left_out_devices=devices)


def step_counter(progress: Progress, what: str, total: int) -> Callable[[], None]:
    """A function that counts its calls and reports them to `progress` as steps of `total`."""
    done = iter(range(1, total + 1))
    return lambda: progress(next(done, total), total, what)


def _fittable_runs(rows: list[PublishedRow]) -> list[MeasuredRun]:
    """The runs to which constants are fitted: those of dense models."""
    runs: list[MeasuredRun] = []
    for row in rows:
        if row.status == "ok" and not is_mixture(row):
            with suppress(UserError, *CONTRADICTIONS):  # it cannot be predicted
                runs.append(measured(row))
    return runs


def _errors_left_out(rows: list[PublishedRow], progress: Progress) -> tuple[dict[str, float], dict[str, float]]:
    """The mean error of each source, and of each accelerator, with constants that were fitted without it."""
    runs = [run for run in _fittable_runs(rows) if run.seconds]
    if len(set(map(by_source, runs))) < 2 and len(set(map(by_accelerator, runs))) < 2:
        names = ", ".join(sorted(set(map(by_source, runs)))) or "none"
        raise UserError(
            f"--leave-out fits the constants without one source, but these runs have no second source or accelerator "
            f"(sources: {names}); remove --leave-out, or give more runs",
            "accuracy.source.single",
        )
    fitted_to_all = FullFit.of(runs, step_counter(progress, "fitting", FIT_STEPS_WITHOUT))
    sources, devices = (
        _mean_errors(predict_unseen(runs, group, fitted_to_all=fitted_to_all), group)
        for group in (by_source, by_accelerator)
    )
    return sources, devices


def _mean_errors(predictions: Iterable[Unseen], group: Callable[[MeasuredRun], str]) -> dict[str, float]:
    """The mean error of each group: the mean over its sources, which differ in their number of rows."""
    errors: dict[str, dict[str, list[float]]] = {}
    for run, seconds in predictions:
        error = abs(seconds / (run.seconds or 1.0) - 1)
        errors.setdefault(group(run), {}).setdefault(run.row.file, []).append(error)
    return {name: fmean(map(fmean, files.values())) for name, files in errors.items()}
