"""The planner against published, measured runs, as one function.

truth(rows="llama3").scores[0].mape
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fivefold.support.errors import UserError
from fivefold.truth.cases import DATA, Measured, Row, measured, read_rows
from fivefold.truth.fit import STEPS, fit, predict
from fivefold.truth.result import TruthResult
from fivefold.truth.score import evaluate

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

    `rows` names one source, whose rows are then shown; `leave_out` also predicts each source with constants that were
    fitted without it (minutes); `refit` fits the constants to the runs and predicts with them.
    """
    every = read_rows(Path(data) if data else DATA)
    files = list(dict.fromkeys(row.file for row in every))
    if rows and rows not in files:
        raise UserError(f"unknown source {rows!r}; there are {', '.join(files)}")
    if rows and not refit:
        every = [row for row in every if row.file == rows]
    constants = fit(_runs(every), _steps(progress, "fitting", STEPS)) if refit else None
    results = evaluate(every, constants, tick=_steps(progress, "predicting", len(every)))
    left = _left_out(every, progress) if leave_out else {}
    return TruthResult(tuple(results), left, rows, constants, own=data is not None)


def _steps(progress: Progress, what: str, total: int) -> Callable[[], None]:
    """Counts the calls, and reports each of them."""
    done = iter(range(1, total + 1))
    return lambda: progress(next(done, total), total, what)


def _runs(every: list[Row]) -> list[Measured]:
    """Those that can be predicted."""
    runs: list[Measured] = []
    for row in every:
        with suppress(UserError):
            runs += [measured(row)] if row.status == "ok" else []
    return runs


def _left_out(every: list[Row], progress: Progress) -> dict[str, float]:
    """The mean error of each source under constants that were fitted without it."""
    runs = [run for run in _runs(every) if run.seconds]
    found = {}
    for name in dict.fromkeys(run.row.file for run in runs):
        others = [run for run in runs if run.row.file != name]
        if not others:
            continue
        constants = fit(others, _steps(progress, f"without {name}", STEPS))
        mine = [run for run in runs if run.row.file == name]
        errors = [abs(predict(run, constants, exact=True) / (run.seconds or 1.0) - 1) for run in mine]
        found[name] = sum(errors) / len(errors)
    return found
