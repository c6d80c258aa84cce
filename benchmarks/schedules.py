"""`python -m benchmarks.schedules`: how long building, checking and simulating pipeline schedules takes.

The cost per action must not grow with their number.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from fivefold.bench.harness import RowsResult
from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.render.blocks import show
from fivefold.schedules.check import check
from fivefold.schedules.registry import build
from fivefold.schedules.simulate import simulate


class ScheduleCase(NamedTuple):
    name: str
    p: int
    m: int
    chunks: int | None = None


CASES = (
    *(ScheduleCase("interleaved", 16, m, 4) for m in (32, 64, 128, 256, 512)),
    ScheduleCase("zb-h1", 64, 512),
    ScheduleCase("interleaved", 64, 512, 2),
    ScheduleCase("auto", 16, 128),
)


class Timing(NamedTuple):
    """Seconds of each part, and how many actions they were spent on."""

    case: ScheduleCase
    compute_actions: int
    actions: int
    build: float
    check: float
    simulate: float

    @property
    def total(self) -> float:
        return self.build + self.check + self.simulate


COLUMNS = {
    "schedule": "name", ">p": "p", ">m": "m", ">v": "v", ">compute": "compute_actions", ">actions": "actions",
    ">build": "build:.3f", ">check": "check:.3f", ">run": "simulate:.3f", ">total": "total:.3f", ">us": "us:.1f",
}  # fmt: skip


def measure_all() -> RowsResult:
    return result([best(case) for case in CASES])


def result(timings: Sequence[Timing]) -> RowsResult:
    keys = ("compute_actions", "actions", "build", "check", "simulate", "total")
    rows = [timing.case._asdict() | {key: getattr(timing, key) for key in keys} for timing in timings]
    beside = [{"v": timing.case.chunks or 1, "us": 1e6 * timing.total / timing.actions} for timing in timings]
    caption = "seconds to build, check and simulate, best of 3; microseconds per action"
    return RowsResult(rows, COLUMNS, caption, beside)


def best(case: ScheduleCase, times: int = 3) -> Timing:
    """The fastest of several runs: what else the machine does can only make a run slower."""
    return min((measure(case) for _ in range(times)), key=lambda timing: timing.total)


def measure(case: ScheduleCase, clock: Callable[[], float] = perf_counter) -> Timing:
    begin = clock()
    schedule = build(case.name, case.p, case.m, chunks=case.chunks)
    built = clock()
    problems = check(schedule)
    checked = clock()
    simulation = simulate(schedule)
    _ = simulation.bubble_makespan, simulation.bubble_span, simulation.peak_activations  # these are made when asked for
    end = clock()
    if problems:
        raise ValueError(f"{case} does not hold: {problems}")
    compute = sum(len(schedule.compute(rank)) for rank in range(schedule.p))
    actions = sum(map(len, schedule.ranks))
    return Timing(case, compute, actions, built - begin, checked - built, end - checked)


def schedules(output: Output = None, as_json: Json = False) -> None:
    """Time building, checking and simulating schedules; the cost per action should not depend on their number.

    [dim]Example:[/]

      python -m benchmarks.schedules
    """
    show(measure_all(), as_json=as_json, output=output)


app = program(schedules)

if __name__ == "__main__":
    main(app)
