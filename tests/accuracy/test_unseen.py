"""What is predicted without having seen a source is what a fit to the others predicts."""

from fivefold.accuracy.cases import MeasuredRun, measured, read_rows
from fivefold.accuracy.fit import by_source, fit, predict, unseen


def runs() -> list[MeasuredRun]:
    """Two small sources."""
    rows = [row for row in read_rows() if row.file in ("llama3", "nemo_performance_pages") and row.text("layers")]
    return [run for run in map(measured, rows[:6]) if run.seconds]


def test_one_set_of_slopes_serves_all_fits_that_leave_a_source_out() -> None:
    found, every = {}, runs()
    for run, seconds in unseen(every, by_source):
        found[run.row.where] = seconds
    assert len(found) == len(every)
    others = fit([run for run in every if run.row.file != "llama3"])
    for run in every:
        if run.row.file == "llama3":
            assert abs(found[run.row.where] / predict(run, others, exact=True) - 1) < 0.01


def test_a_source_alone_leaves_nothing_to_fit() -> None:
    assert list(unseen([run for run in runs() if run.row.file == "llama3"], by_source)) == []
