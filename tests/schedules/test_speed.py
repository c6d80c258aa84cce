"""Schedules are cheap: sixteen thousand actions in a blink, linear growth, and no heavy import."""

import subprocess
import sys
from time import process_time

import pytest
from benchmarks.schedules import ScheduleCase, measure

pytestmark = pytest.mark.alone


def test_sixteen_thousand_actions_take_well_under_half_a_second() -> None:
    timings = [measure(ScheduleCase("interleaved", 16, 128, 4), clock=process_time) for _ in range(3)]
    assert timings[0].compute_actions == 16_384
    assert min(timing.total for timing in timings) < 0.5


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "v-half"])
def test_the_cost_grows_linearly(name: str) -> None:
    def cost(m: int) -> float:
        return min(measure(ScheduleCase(name, 8, m), clock=process_time).total for _ in range(3)) / m

    assert cost(192) < 2.0 * cost(48)


def test_schedules_and_clusters_need_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, fivefold.schedules, fivefold.schedules.draw, fivefold.cli.draw, fivefold.hardware.cluster;"
        "print(*{'torch', 'numpy', 'PIL'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"
