"""The bubble that was measured, against the simulator's: real executor, real ranks, stages of known durations."""

from dataclasses import astuple, replace

import pytest

from fivefold.launch.host import cores
from fivefold.schedules.costs import Costs
from fivefold.schedules.simulate import simulate
from fivefold.tracing.records import Trace
from fivefold.tracing.summary import TraceSummary
from tests.ranks import run_ranks
from tests.tracing.asleep import Naps, sleep

pytestmark = pytest.mark.alone

# Seconds of F, I and W, and B is I + W: where ranks are more than cores, sleeps do not fight for them.
NAPS = Naps(f=0.030, i=0.036, w=0.024)
ALLOWED = 0.05  # of the run
SLOW = [
    "pp=2,microbatches=4,schedule=zb-h1",
    "pp=2,microbatches=4,schedule=zb-v",
    "pp=4,microbatches=6,schedule=1f1b",
    "pp=4,microbatches=4,schedule=interleaved",
]


def bubble_of_step(trace: Trace, step: int) -> float:
    """As measured in one of the traced steps."""
    ranks = tuple(replace(rank, steps=rank.steps[step : step + 1]) for rank in trace.ranks)
    return TraceSummary(replace(trace, ranks=ranks)).bubble.measured


@pytest.mark.parametrize(
    "layout",
    [
        "pp=2,microbatches=4,schedule=1f1b",
        "pp=2,microbatches=4,schedule=interleaved",
        "pp=4,microbatches=6,schedule=zb-h1",
        "pp=4,microbatches=4,schedule=zb-v",
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW),
    ],
)
def test_the_measured_bubble_is_the_simulated_one_within_5_percent_of_the_run(layout: str) -> None:
    """The shortest of three runs: whoever else uses this machine can only make a run longer. Where that is still too
    much, naps of twice the length, and again: then the same disturbance is a smaller part of the run."""
    for longer in (1, 2, 4, 8):  # the longer, the less a neighbour on the machine matters
        naps = Naps(*(longer * seconds for seconds in astuple(NAPS)[:3]))
        trace = run_ranks(int(layout[3]), sleep, layout, naps, 3)[0]
        summary, stages = TraceSummary(trace), trace.schedule.placement.stages
        each = {name: (getattr(naps, name),) * stages for name in "fiw"}
        known = simulate(trace.schedule, Costs(**each, b=(naps.i + naps.w,) * stages, activation=(1.0,) * stages))
        shortest = min(range(trace.step_count), key=lambda step: summary.makespan(0, step))
        measured, predicted = bubble_of_step(trace, shortest), summary.simulations[0].bubble_makespan
        print(f"{layout}: {measured:.4f} measured, {known.bubble_makespan:.4f} of the naps, {predicted:.4f} predicted")
        assert summary.makespan(0, shortest) >= known.makespan
        if max(abs(measured - known.bubble_makespan), abs(measured - predicted)) < ALLOWED:
            break
    assert measured == pytest.approx(known.bubble_makespan, abs=ALLOWED)
    assert measured == pytest.approx(predicted, abs=ALLOWED)


@pytest.mark.skipif(cores() < 2, reason="two ranks that compute need two cores")
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb-h1"])
def test_the_same_with_stages_that_compute_while_every_rank_has_a_core(schedule: str) -> None:
    """Products of matrices of one size, many in an action. The simulator is given the medians of what they took."""
    found = []
    for longer in (1, 2, 4, 8):  # the longer, the less a neighbour on the machine matters
        naps = Naps(*(longer * seconds for seconds in astuple(NAPS)[:3]), working=True)
        trace = run_ranks(2, sleep, f"pp=2,microbatches=4,schedule={schedule}", naps, 3)[0]
        summary = TraceSummary(trace)
        shortest = min(range(trace.step_count), key=lambda step: summary.makespan(0, step))
        found.append((bubble_of_step(trace, shortest), summary.simulations[0].bubble_makespan))
        if abs(found[-1][0] - found[-1][1]) < ALLOWED:
            break
    measured, predicted = found[-1]
    assert measured == pytest.approx(predicted, abs=ALLOWED), found
