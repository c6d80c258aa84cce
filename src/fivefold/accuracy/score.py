"""Scores the planner on measured runs: errors of time and memory, predictions of out-of-memory, and its choices."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from fivefold.accuracy.cases import MeasuredRun, PublishedRow, measured
from fivefold.accuracy.fit import Constants, predict
from fivefold.accuracy.mixture_rows import is_mixture, superseded_rows
from fivefold.accuracy.spelling import UnpredictableRow
from fivefold.cost.model_state import paper
from fivefold.cost.peak_memory import USABLE_FRACTION, footprint
from fivefold.support.errors import UserError

CONTRADICTIONS = (
    ArithmeticError,
    ValueError,
    IndexError,
    AssertionError,
)  # of a row's numbers


@dataclass(frozen=True)
class RowScore:
    """One row: what was measured and what is predicted, or why nothing can be predicted."""

    row: PublishedRow
    run: MeasuredRun | None = None
    seconds: float | None = None  # predicted
    memory: float | None = None  # predicted bytes, as an allocator counts them
    fits: bool | None = None
    planned: bool = False  # it fits with the headroom that a plan leaves
    refused: str = ""
    theory: float | None = None  # published bytes, for a row that is computed and not measured

    @property
    def error(self) -> float | None:
        """The relative error of time: predicted / measured - 1."""
        return self._relative(self.seconds, self.run and self.run.seconds)

    @property
    def memory_error(self) -> float | None:
        if self.theory is not None and self.memory is not None:
            return self.memory / self.theory - 1
        return self._relative(self.memory, self.run and self.run.memory)

    def _relative(self, predicted: float | None, measured: float | None) -> float | None:
        if predicted is None or measured is None or self.row.status != "ok":
            return None
        return predicted / measured - 1

    def to_dict(self) -> dict[str, Any]:
        run = self.run
        return {
            "source": self.row.file,
            "line": self.row.line,
            "model": self.row.text("model"),
            "status": self.row.status,
            "refused": self.refused or None,
            "layout": str(run.workload.layout) if run else None,
            "measured_seconds": run.seconds if run and self.row.status == "ok" else None,
            "predicted_seconds": self.seconds,
            "error": self.error,
            "measured_memory": run.memory if run else None,
            "predicted_memory": self.memory,
            "memory_error": self.memory_error,
            "fits": self.fits,
        }


def evaluate(
    rows: Iterable[PublishedRow],
    constants: Constants | None = None,
    *,
    exact: bool = True,
    tick: Callable[[], None] = lambda: None,
) -> list[RowScore]:
    """Predict every row, or say why it cannot be predicted. `tick` is called after each."""
    results, rows = [], list(rows)
    superseded = superseded_rows(rows)
    for row in rows:
        try:
            if (row.file, row.line) in superseded:
                raise UnpredictableRow("a later release ran the same configuration")
            results.append(_theory(row) if row.status == "theory" else _predicted(row, constants, exact=exact))
        except UserError as error:
            results.append(RowScore(row, refused=str(error)))
        except CONTRADICTIONS as error:
            results.append(RowScore(row, refused=f"its numbers contradict each other ({error})"))
        tick()
    return results


def _theory(row: PublishedRow) -> RowScore:
    """A row of the ZeRO paper, whose memory is computed by the paper's own formula."""
    count, ranks, published = row.number("params_b"), row.integer("dp"), row.number("peak_mem_gb")
    stage = row.integer("zero_stage")
    if not (count and ranks and published) or stage is None:
        raise UnpredictableRow("params_b, dp, zero_stage or peak_mem_gb is not published")
    return RowScore(row, memory=paper(count * 1e9, stage, ranks).total, theory=published * 1e9)


def _predicted(row: PublishedRow, constants: Constants | None, *, exact: bool) -> RowScore:
    if row.status not in ("ok", "oom"):
        raise UnpredictableRow(f"status {row.status!r} is not a measurement")
    run = measured(row)
    if is_mixture(row):
        return RowScore(row, run, predict(run, constants, exact=exact) if run.seconds is not None else None)
    needs, memory = footprint(run.workload), run.workload.first_device.accelerator.memory
    fits, planned = needs.total <= memory, needs.total <= USABLE_FRACTION * memory
    seconds = predict(run, constants, exact=exact) if run.seconds is not None or row.status == "oom" else None
    return RowScore(
        row, run, seconds, needs.reserved if run.source.publishes_reserved_memory else needs.allocated, fits, planned
    )


EXPERTS_SUFFIX = ", experts"  # of a line's name if its models have experts
MIN_EXPERTS_ROWS = 5  # a line of models with experts that has fewer rows is shown, but not part of a mean


@dataclass(frozen=True)
class Score:
    """The errors of one source."""

    source: str
    rows: int
    timed: int
    refused: int
    mape: float | None
    median_ape: float | None
    bias: float | None
    null_mape: float | None
    worst: RowScore | None
    memory_rows: int
    memory_mape: float | None
    oom_rows: int
    oom_right: float | None
    oom_precision: float | None
    oom_recall: float | None

    @property
    def experts(self) -> bool:
        return self.source.endswith(EXPERTS_SUFFIX)

    @property
    def judged(self) -> bool:
        """Whether it is part of a mean."""
        return self.mape is not None and not (self.experts and self.timed < MIN_EXPERTS_ROWS)

    def to_dict(self) -> dict[str, Any]:
        worst = {"row": self.worst.row.where, "error": self.worst.error} if self.worst else None
        return {name: value for name, value in vars(self).items() if name != "worst"} | {"worst": worst}


def score(source: str, results: Sequence[RowScore]) -> Score:
    timed = [result for result in results if result.error is not None]
    errors = [result.error for result in results if result.error is not None]
    absolute = [abs(error) for error in errors]
    memory = [abs(result.memory_error) for result in results if result.memory_error is not None]
    with_memory = [result for result in results if result.fits is not None]
    # Figures of out-of-memory are given only for a source that reports such rows.
    failed = [result for result in with_memory if result.row.status == "oom"]
    predicted = [result for result in with_memory if not result.fits]
    true_positives = [result for result in failed if not result.fits]
    right = sum((result.row.status == "oom") == (not result.fits) for result in with_memory)
    return Score(
        source=source,
        rows=len(results),
        timed=len(timed),
        refused=sum(bool(result.refused) for result in results),
        mape=fmean(absolute) if absolute else None,
        median_ape=median(absolute) if absolute else None,
        bias=fmean(errors) if errors else None,
        null_mape=null_error([result.run for result in timed if result.run]) if timed else None,
        worst=max(timed, key=lambda result: abs(result.error or 0.0), default=None),
        memory_rows=len(memory),
        memory_mape=fmean(memory) if memory else None,
        oom_rows=len(failed),
        oom_right=right / len(with_memory) if failed else None,
        oom_precision=len(true_positives) / len(predicted) if failed and predicted else None,
        oom_recall=len(true_positives) / len(failed) if failed else None,
    )


def scores(results: Sequence[RowScore]) -> list[Score]:
    """A score for each source (a file); models with experts have a line of their own."""
    lines: dict[str, list[RowScore]] = {}
    for result in results:
        lines.setdefault(line_of(result.row), []).append(result)
    return [score(name, line_results) for name, line_results in lines.items()]


def line_of(row: PublishedRow) -> str:
    """The name of the line in the table to which a row belongs."""
    return f"{row.file}{EXPERTS_SUFFIX}" if is_mixture(row) else row.file


def null_seconds(runs: Sequence[MeasuredRun]) -> list[float]:
    """The step times by the null model, which knows only the best single hardware utilisation of these runs."""
    ideal = []  # seconds at the peak rate, with recomputation
    for workload in (run.workload for run in runs):
        recompute = 4 / 3 if workload.layout.recompute == "full" else 1.0
        peak = workload.first_device.accelerator.rate(workload.precision) * workload.layout.world
        ideal.append(workload.flops() * recompute / peak)
    ratio = np.array([run.seconds for run in runs]) / ideal
    # The mean of |u r - 1| over the rows is least where u is one of 1/r: the best constant is found by trying all.
    best = min(ratio, key=lambda inverse: float(np.mean(np.abs(inverse / ratio - 1))))
    return [float(best * seconds) for seconds in ideal]


def null_error(runs: Sequence[MeasuredRun]) -> float:
    """The mean error of the null model."""
    return fmean(abs(seconds / (run.seconds or 1.0) - 1) for seconds, run in zip(null_seconds(runs), runs, strict=True))


MIN_SWEEP_LAYOUTS = 3


class SweepChoice(NamedTuple):
    """A sweep: the layout that the planner chooses, and the best measured one."""

    name: str
    layouts: int
    chosen: RowScore
    best: RowScore
    tried: tuple[RowScore, ...] = ()

    @property
    def out_of_memory(self) -> bool:
        return self.chosen.row.status == "oom"

    @property
    def regret(self) -> float:
        """How much longer a step takes than with the best measured layout."""
        chosen, best = self.chosen.run, self.best.run
        if self.out_of_memory or chosen is None or best is None or not chosen.seconds or not best.seconds:
            return float("inf")
        return chosen.seconds / best.seconds - 1


def choices(results: Sequence[RowScore]) -> list[SweepChoice]:
    """The planner's choice in each sweep among all layouts that were tried, including those that failed."""
    # Rows of one source with the same work on the same machines, and the same software.
    columns = ("source", "model", "seq_len", "gpu", "gpus", "global_batch", "precision")
    sweeps: dict[tuple[str, ...], list[RowScore]] = {}
    for result in results:
        if result.run is not None and result.seconds is not None:
            software = result.run.workload.software
            key = (*map(result.row.text, columns), f"{software.attention}/{software.norm}")
            sweeps.setdefault(key, []).append(result)
    chosen_by_sweep = []
    for key, tried in sweeps.items():
        fitting = [result for result in tried if result.planned]
        timed = [result for result in tried if result.error is not None]
        if len(tried) < MIN_SWEEP_LAYOUTS or len(timed) < 2 or not fitting:
            continue
        chosen = min(fitting, key=lambda result: result.seconds or 0.0)
        best = min(timed, key=lambda result: result.run.seconds if result.run and result.run.seconds else 0.0)
        chosen_by_sweep.append(SweepChoice(", ".join(filter(None, key)), len(tried), chosen, best, tuple(tried)))
    return chosen_by_sweep


def median_regret(chosen: Sequence[SweepChoice]) -> float | None:
    return median(choice.regret for choice in chosen) if chosen else None
