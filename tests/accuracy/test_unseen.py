"""What is predicted without having seen a source is what a fit to the others predicts."""

from fivefold.accuracy.cases import MeasuredRun, measured, read_rows
from fivefold.accuracy.fit import by_source, fit, predict, predict_unseen

SOURCES = ("internevo", "torchtitan")  # runs that are quickly predicted


def runs() -> list[MeasuredRun]:
    """Three of each."""
    rows = read_rows()
    return [measured(row) for source in SOURCES for row in [row for row in rows if row.file == source][:3]]


def test_one_set_of_slopes_serves_all_fits_that_leave_a_source_out() -> None:
    every = runs()
    found = {run.row.where: seconds for run, seconds in predict_unseen(every, by_source)}
    assert len(found) == len(every) == 6
    others = fit([run for run in every if run.row.file != SOURCES[0]])
    for run in every[:3]:
        assert abs(found[run.row.where] / predict(run, others, exact=True) - 1) < 0.01


def test_a_source_alone_leaves_nothing_to_fit() -> None:
    assert list(predict_unseen(runs()[:3], by_source)) == []
