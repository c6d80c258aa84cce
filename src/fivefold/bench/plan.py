"""`fivefold bench plan`: how long the planner's whole search takes, on one core, in this process."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from fivefold.bench.result import BenchResult
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.plan.cost.time import Case
from fivefold.plan.search.search import search
from fivefold.report import Block, Table
from fivefold.spec.presets import preset


class Question(NamedTuple):
    model: str
    cluster: str
    seq: int
    batch: int
    most: float  # seconds that it should take at most


QUESTIONS = (
    Question("llama3-8b", "8xH100", 8192, 128, 1.0),
    Question("llama3-70b", "8x8xH100", 8192, 512, 5.0),
    Question("llama3-405b", "2048x8xH100", 8192, 2048, 5.0),
    Question("llama3-405b", "2048x8xH100", 131072, 128, 5.0),
)


class Timing(NamedTuple):
    question: Question
    seconds: float
    weighed: int


@dataclass(frozen=True)
class PlanBenchResult(BenchResult):
    rounds: int
    timings: list[Timing]

    def to_dict(self) -> list[dict[str, Any]]:
        return [one.question._asdict() | {"seconds": one.seconds, "weighed": one.weighed} for one in self.timings]

    def blocks(self) -> Iterator[Block]:
        rows = [
            (
                *(asked.model, asked.cluster, f"{asked.seq:,}", f"{asked.batch:,}"),
                *(f"{weighed:,}", f"{seconds:.2f}", f"{asked.most:g}"),
            )
            for asked, seconds, weighed in self.timings
        ]
        heads = ["model", "cluster", ">sequence", ">batch", ">layouts evaluated", ">seconds", ">at most"]
        yield Table(heads, rows, caption=f"medians of {self.rounds} cold searches")


def measure(rounds: int = 3) -> PlanBenchResult:
    return PlanBenchResult(rounds, [time_search(question, rounds) for question in QUESTIONS])


def time_search(question: Question, rounds: int, clock: Callable[[], float] = perf_counter) -> Timing:
    """The median of cold searches: what earlier ones left behind is thrown away."""
    case = Case(preset(question.model), Layout(), Cluster.parse(question.cluster), question.seq, question.batch)
    times, weighed = [], 0
    for _ in range(rounds):
        empty_caches()
        begin = clock()
        weighed = search(case).evaluated
        times.append(clock() - begin)
    return Timing(question, median(times), weighed)


def empty_caches() -> None:
    """Of every function that planning calls."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fivefold.plan.", "fivefold.layout.", "fivefold.schedule.")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
