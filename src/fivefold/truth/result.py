"""What `fivefold truth` found: errors by source, sweeps, and rows; for people and as JSON."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fivefold.report import Block, Result, Table, Text
from fivefold.report.scene import Scene
from fivefold.truth.cases import source_of
from fivefold.truth.fit import FITTED, Constants
from fivefold.truth.picture import scatter
from fivefold.truth.score import Choice, RowScore, Score, choices, median_regret, scores
from fivefold.truth.sources import ANY, SOURCES

_LINES = 5  # of refused rows that are named


@dataclass(frozen=True)
class TruthResult(Result):
    results: tuple[RowScore, ...]
    left_out: dict[str, float]  # by source: the mean error under constants that were fitted without it
    shown: str  # the source whose rows are shown
    constants: Constants | None  # that were fitted
    left_devices: dict[str, float] = field(default_factory=dict)  # by accelerator, likewise
    own: bool = False  # of a directory of the user's: which software was assumed is told

    @cached_property
    def scores(self) -> list[Score]:
        return scores(self.results)

    @cached_property
    def sweeps(self) -> list[Choice]:
        return choices(self.results)

    @property
    def mean_mape(self) -> float | None:
        """The mean of the sources' mean errors."""
        return self._mean_of("mape", experts=False)

    @property
    def experts_mape(self) -> float | None:
        """The same of models with experts, of sources that have at least five such rows."""
        return self._mean_of("mape", experts=True)

    def _mean_of(self, what: str, experts: bool) -> float | None:
        return _mean([getattr(one, what) or 0.0 for one in self.scores if one.judged and one.experts is experts])

    def to_dict(self) -> dict[str, Any]:
        left = self.left_out
        return {
            "sources": {
                one.source: one.to_dict() | ({"left_out_mape": left[one.source]} if one.source in left else {})
                for one in self.scores
            },
            "mean_mape": self.mean_mape,
            "left_out_by_accelerator": self.left_devices,
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
            rows = [(one.where, one.name, f"{one.guess:.4g}", f"{self.constants.value(one):.4g}") for one in FITTED]
            caption = "guess: what kernel benchmarks and papers report"
            yield Table(["of", "constant", ">guess", ">fitted"], rows, title="Constants", caption=caption)
        yield self._errors()
        if self.left_devices:
            devices = [(name, _percent(error)) for name, error in self.left_devices.items()]
            caption = "the mean of its sources' errors, under constants that were fitted without all of its runs"
            yield Table(
                ["accelerator", ">left out"], devices, title="Accelerators that nobody has measured", caption=caption
            )
        yield from self._memory()
        if self.own:
            yield from self._software()
        yield Text("")
        yield from self._sentences()
        if self.shown:
            yield _rows([result for result in self.results if result.row.file == self.shown])
        refused: dict[tuple[str, str], list[int]] = {}
        for result in self.results:
            if result.refused:
                refused.setdefault((result.row.file, result.refused), []).append(result.row.line)
        for (source, reason), lines in refused.items():
            more = " ..." if len(lines) > _LINES else ""
            where = f" (line {', '.join(map(str, lines[:_LINES]))}{more})" if self.own else ""
            yield Text(f"refused: {len(lines)} of {source}{where}: {reason}")

    def _errors(self) -> Table:
        left = self.left_out
        heads = ["source", ">rows", ">timed", ">error", ">median", ">bias", ">null model", ">worst"]
        rows = []
        for one in self.scores:
            cells = [one.source, str(one.rows), str(one.timed), _percent(one.mape), _percent(one.median_ape)]
            worst = one.worst.error if one.worst else None
            cells += [_percent(one.bias, signed=True), _percent(one.null_mape), _percent(worst, signed=True)]
            rows.append(cells + ([_percent(left.get(one.source))] if left else []))
        totals = []
        for experts, name in ((False, "mean of sources"), (True, "mean of sources, experts")):
            if (error := self._mean_of("mape", experts)) is not None:
                null = _percent(self._mean_of("null_mape", experts))
                without = None if experts else _mean([*left.values()])
                totals.append([name, "", "", _percent(error), "", "", null, ""])
                totals[-1] += [_percent(without)] if left else []
        return Table(
            heads + ([">left out"] if left else []),
            rows,
            title="The planner against measured runs",
            caption="timed: rows with a measured time; error: mean absolute error of the step time; null model: the "
            "error of the best single hardware utilisation per source; models with experts have lines of their own, "
            "which count from five rows on"
            + ("; left out: the error under constants fitted without the source" if left else ""),
            totals=totals,
        )

    @cached_property
    def software(self) -> list[tuple[str, str, bool, str]]:
        """By source: the software that its rows are predicted with, whether that is a guess, and who says so."""
        rows = ((result.row.file, source_of(result.row)) for result in self.results if result.run)
        found = ((file, source.stack.name, source.assumed, source.why) for file, source in rows)
        return list(dict.fromkeys(found))

    def _software(self) -> Iterator[Block]:
        rows = [(file, name, "assumed" if guess else "described", why) for file, name, guess, why in self.software]
        caption = "a column `system`, or NAME.toml beside NAME.csv, describes the software of a run"
        yield Table(["source", "~software", "", "~by"], rows, title="The software of these runs", caption=caption)

    def _memory(self) -> Iterator[Table]:
        """Of the sources that publish memory or failures, or have rows that cannot be predicted."""
        rows = [
            [
                one.source,
                str(one.refused or ""),
                f"{_percent(one.memory_mape)} ({one.memory_rows})" if one.memory_rows else "",
                *map(_percent, (one.oom_right, one.oom_precision, one.oom_recall)),
            ]
            for one in self.scores
            if one.refused or one.memory_rows or one.oom_right is not None
        ]
        heads = ["source", ">refused", ">memory error (rows)", ">OOM right", ">precision", ">recall"]
        caption = (
            "refused: rows that cannot be predicted; OOM right: rows of which the planner says rightly whether they fit"
        )
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
    """What is assumed of each source where its rows do not say."""

    def to_dict(self) -> list[dict[str, Any]]:
        return [
            {"source": one.match or "any other", "software": one.stack.name}
            | {name: getattr(one, name) for name in ("zero", "sp", "recompute", "why")}
            for one in (*SOURCES, ANY)
        ]

    def blocks(self) -> Iterator[Block]:
        heads = ["~source", "~software", ">zero", "sp", "recompute", "~why"]
        rows = [list(map(str, row.values())) for row in self.to_dict()]
        yield Table(heads, rows, title="What is assumed of each source where its rows do not say")


def _rows(results: list[RowScore]) -> Table:
    # What the planner says of memory is compared only where memory was measured, or ran out.
    judged = any(result.row.status == "oom" or (result.run and result.run.memory) for result in results)
    rows = []
    for result in results:
        line, run = str(result.row.line), result.run
        if run is None:
            rows.append([line, result.row.text("model"), result.refused or "arithmetic of a paper"])
            continue
        measured = "out of memory" if result.row.status == "oom" else f"{run.seconds:.4g} s" if run.seconds else ""
        predicted = f"{result.seconds:.4g} s" if result.seconds else ""
        cells = [line, run.case.spec.name, str(run.case.layout).partition(",split=")[0], measured, predicted]
        memory = [_gigabytes(run.memory), _gigabytes(result.memory), "yes" if result.fits else "no"] if judged else []
        rows.append([*cells, _percent(result.error, signed=True), *memory])
    memory_heads = [">memory", ">predicted", ">fits"] if judged else []
    return Table([">line", "model", "~layout", ">measured", ">predicted", ">error", *memory_heads], rows, title="Rows")


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(value: float | None, signed: bool = False) -> str:
    return "" if value is None else f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def _gigabytes(size: float | None) -> str:
    return f"{size / 1e9:.1f} GB" if size else ""
