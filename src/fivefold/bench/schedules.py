"""`fivefold bench schedules`: the time to build, check and simulate schedules.

The cost per action must not grow with their size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

from fivefold.bench.result import BenchResult
from fivefold.report import Block, Table
from fivefold.schedule.catalogue import build
from fivefold.schedule.check import check
from fivefold.schedule.simulate import simulate


class Case(NamedTuple):
    name: str
    p: int
    m: int
    chunks: int | None = None


CASES = (
    Case("interleaved", 16, 32, 4),
    Case("interleaved", 16, 64, 4),
    Case("interleaved", 16, 128, 4),
    Case("interleaved", 16, 256, 4),
    Case("interleaved", 16, 512, 4),
    Case("zb-h1", 64, 512),
    Case("interleaved", 64, 512, 2),
    Case("auto", 16, 128),
)


class Timing(NamedTuple):
    """Seconds of each part, and how many actions they were spent on."""

    case: Case
    compute_actions: int
    actions: int
    build: float
    check: float
    simulate: float

    @property
    def total(self) -> float:
        return self.build + self.check + self.simulate


@dataclass(frozen=True)
class SchedulesBenchResult(BenchResult):
    timings: list[Timing]

    def to_dict(self) -> list[dict[str, Any]]:
        keys = ("compute_actions", "actions", "build", "check", "simulate", "total")
        return [timing.case._asdict() | {key: getattr(timing, key) for key in keys} for timing in self.timings]

    def blocks(self) -> Iterator[Block]:
        rows = []
        for timing in self.timings:
            name, p, m, v = timing.case
            counts = (p, m, v or 1, timing.compute_actions, timing.actions)
            seconds = (timing.build, timing.check, timing.simulate, timing.total)
            per_action = f"{1e6 * timing.total / timing.actions:.1f}"
            rows.append((name, *map(str, counts), *(f"{value:.3f}" for value in seconds), per_action))
        heads = ("p", "m", "v", "compute", "actions", "build", "check", "run", "total", "us")
        caption = "seconds to build, check and simulate, best of 3; microseconds per action"
        yield Table(["schedule", *(f">{head}" for head in heads)], rows, caption=caption)


def measure_all() -> SchedulesBenchResult:
    return SchedulesBenchResult([best(case) for case in CASES])


def best(case: Case, times: int = 3) -> Timing:
    """The fastest of several runs: what else the machine does can only make a run slower."""
    return min((measure(case) for _ in range(times)), key=lambda timing: timing.total)


def measure(case: Case, clock: Callable[[], float] = perf_counter) -> Timing:
    """Build, check and simulate one schedule."""
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
