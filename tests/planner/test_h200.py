"""Training steps of this code on one H200, measured by `fivefold bench train --cases`, against the planner."""

from fivefold.accuracy.coverage import h200_steps
from fivefold.cost.peak_memory import footprint
from fivefold.cost.step import estimate


def test_steps_are_within_10_percent() -> None:
    """Compiled. Most are slower than planned: dense steps draw more power than the block that was calibrated."""
    errors = [estimate(workload).seconds / seconds - 1 for workload, seconds, _ in h200_steps()]
    assert len(errors) >= 20
    assert max(map(abs, errors)) < 0.10, errors
    assert sum(map(abs, errors)) / len(errors) < 0.055, errors


def test_peak_memory_is_no_more_than_planned() -> None:
    """The planner counts what eager blocks keep; a compiled graph keeps less where nothing is recomputed."""
    errors = [footprint(workload).allocated / memory - 1 for workload, _, memory in h200_steps()]
    assert min(errors) > -0.03, errors
    assert max(errors) < 0.14, errors
