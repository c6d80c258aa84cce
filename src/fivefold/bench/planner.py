"""`python -m benchmarks.plan`: how long the planner's whole search takes, on one core, in this process."""

import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from fivefold.bench.harness import RowsResult
from fivefold.cost.step import Case
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.search import search
from fivefold.schedules.check import check
from fivefold.schedules.registry import build
from fivefold.schedules.simulate import simulate
from fivefold.spec.presets import preset


class PlanQuestion(NamedTuple):
    model: str
    cluster: str
    seq: int
    batch: int
    most: float  # seconds that it should take at most


QUESTIONS = (
    PlanQuestion("llama3-8b", "8xH100", 8192, 128, 1.0),
    PlanQuestion("llama3-70b", "8x8xH100", 8192, 512, 5.0),
    PlanQuestion("llama3-70b", "2x8xH100+2x8xA100", 8192, 512, 5.0),
    PlanQuestion("llama3-405b", "2048x8xH100", 8192, 2048, 5.0),
    PlanQuestion("llama3-405b", "2048x8xH100", 131072, 128, 5.0),
    PlanQuestion("deepseek-v3", "256x8xH100", 4096, 8192, 10.0),
)


COLUMNS = {
    "model": "model", "cluster": "cluster", ">sequence": "seq:,", ">batch": "batch:,",
    ">layouts evaluated": "weighed:,", ">seconds": "seconds:.2f", ">at most": "most:g",
}  # fmt: skip


def measure(rounds: int = 3) -> RowsResult:
    rows = [question._asdict() | time_search(question, rounds) for question in QUESTIONS]
    return RowsResult(rows, COLUMNS, f"median of {rounds} cold searches")


def time_search(question: PlanQuestion, rounds: int) -> dict[str, Any]:
    """The median of cold searches: what earlier ones left behind is thrown away."""
    case = Case(preset(question.model), Layout(), Cluster.parse(question.cluster), question.seq, question.batch)
    times, evaluated = [], 0
    for _ in range(rounds):
        empty_caches()
        begin = perf_counter()
        evaluated = search(case).evaluated
        times.append(perf_counter() - begin)
    return {"seconds": median(times), "weighed": evaluated}


def empty_caches() -> None:
    """Of every function that planning calls."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fivefold.planner.", "fivefold.layout.", "fivefold.schedules.")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


# ---- schedules ------------------------------------------------------------------------------------------------------
# `python -m benchmarks.schedules`: the time to build, check and simulate schedules.
#
# The cost per action must not grow with their size.


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


SCHEDULE_COLUMNS = {
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
    return RowsResult(rows, SCHEDULE_COLUMNS, caption, beside)


def best(case: ScheduleCase, times: int = 3) -> Timing:
    """The fastest of several runs: what else the machine does can only make a run slower."""
    return min((measure_schedules(case) for _ in range(times)), key=lambda timing: timing.total)


def measure_schedules(case: ScheduleCase, clock: Callable[[], float] = perf_counter) -> Timing:
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
