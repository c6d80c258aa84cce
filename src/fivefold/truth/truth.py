"""The planner against published, measured runs, as one function.

truth(rows="llama3").scores[0].mape
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fivefold.support.errors import UserError
from fivefold.truth.cases import DATA, Measured, Row, measured, read_rows
from fivefold.truth.fit import STEPS, STEPS_WITHOUT, fit
from fivefold.truth.result import TruthResult
from fivefold.truth.score import evaluate
from fivefold.truth.unseen import by_source, unseen

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
    fitted without it (a minute); `refit` fits the constants to the runs and predicts with them.
    """
    every = read_rows(Path(data) if data else DATA)
    files = list(dict.fromkeys(row.file for row in every))
    if rows and rows not in files:
        raise UserError(f"unknown source {rows!r}; there are {', '.join(files)}")
    if rows and not refit:
        every = [row for row in every if row.file == rows]
    constants = fit(_runs(every), steps(progress, "fitting", STEPS)) if refit else None
    results = evaluate(every, constants, tick=steps(progress, "predicting", len(every)))
    left = _left_out(every, progress) if leave_out else {}
    return TruthResult(tuple(results), left, rows, constants, own=data is not None)


def steps(progress: Progress, what: str, total: int) -> Callable[[], None]:
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
    found: dict[str, list[float]] = {}
    for run, seconds in unseen(runs, by_source, steps(progress, "fitting without each source", STEPS_WITHOUT)):
        found.setdefault(run.row.file, []).append(abs(seconds / (run.seconds or 1.0) - 1))
    return {name: sum(errors) / len(errors) for name, errors in found.items()}
