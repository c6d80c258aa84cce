"""The planner against published, measured runs, as one function.

truth(rows="llama3").scores[0].mape
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from fivefold.support.errors import UserError
from fivefold.truth.cases import DATA, Measured, Row, measured, read_rows
from fivefold.truth.fit import STEPS, STEPS_WITHOUT, Whole, fit
from fivefold.truth.mixtures import is_mixture
from fivefold.truth.result import TruthResult
from fivefold.truth.score import NONSENSE, evaluate
from fivefold.truth.unseen import Unseen, by_accelerator, by_source, unseen

Progress = Callable[[int, int, str], None]  # steps so far, all steps, what is done


def truth(
    data: str | Path | None = None,
    *,
    rows: str = "",
    leave_out: bool = False,
    refit: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> TruthResult:
    """Predict every run of a directory of CSV files, by default of those that come with the package.

        ff.truth()
        ff.truth(rows="llama3")

    `rows` names one source, whose rows are then shown; `leave_out` also predicts each source, and each accelerator,
    with constants that were fitted without it (minutes); `refit` fits the constants to the runs and predicts with them.
    """
    every = read_rows(Path(data) if data else DATA)
    files = list(dict.fromkeys(row.file for row in every))
    if rows and rows not in files:
        raise UserError(f"unknown source {rows!r}; there are {', '.join(files)}")
    if rows and not refit:
        every = [row for row in every if row.file == rows]
    constants = fit(_runs(every), steps(progress, "fitting", STEPS)) if refit else None
    left, devices = _left_out(every, progress) if leave_out else ({}, {})
    results = evaluate(every, constants, tick=steps(progress, "predicting", len(every)))
    return TruthResult(tuple(results), left, rows, constants, own=data is not None, left_devices=devices)


def steps(progress: Progress, what: str, total: int) -> Callable[[], None]:
    """Counts the calls, and reports each of them."""
    done = iter(range(1, total + 1))
    return lambda: progress(next(done, total), total, what)


def _runs(every: list[Row]) -> list[Measured]:
    """Those that can be predicted."""
    runs: list[Measured] = []
    for row in every:
        with suppress(UserError, *NONSENSE):
            # Constants are those of dense models: what experts add has none that is fitted.
            runs += [measured(row)] if row.status == "ok" and not is_mixture(row) else []
    return runs


def _left_out(every: list[Row], progress: Progress) -> tuple[dict[str, float], dict[str, float]]:
    """The mean error of each source, and of each accelerator, under constants that were fitted without it."""
    runs = [run for run in _runs(every) if run.seconds]
    if len(set(map(by_source, runs))) < 2 and len(set(map(by_accelerator, runs))) < 2:
        names = ", ".join(sorted(set(map(by_source, runs)))) or "none"
        raise UserError(
            f"--leave-out fits the constants without one source, and these runs have no second source or accelerator "
            f"(sources: {names}); leave --leave-out out, or give more runs"
        )
    whole = Whole.of(runs, steps(progress, "fitting", STEPS_WITHOUT))
    sources, devices = (_mean_errors(unseen(runs, group, whole=whole), group) for group in (by_source, by_accelerator))
    return sources, devices


def _mean_errors(found: Iterable[Unseen], group: Callable[[Measured], str]) -> dict[str, float]:
    """Of an accelerator the mean of its sources', which differ in their number of rows."""
    errors: dict[str, dict[str, list[float]]] = {}
    for run, seconds in found:
        error = abs(seconds / (run.seconds or 1.0) - 1)
        errors.setdefault(group(run), {}).setdefault(run.row.file, []).append(error)
    return {name: fmean(map(fmean, files.values())) for name, files in errors.items()}
