"""`fivefold bench plan`: how long the planner's whole search takes, on one core, in this process."""

import sys
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from fivefold.bench.harness import RowsResult
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.plan.cost.time import Case
from fivefold.plan.search.search import search
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
    Question("llama3-70b", "2x8xH100+2x8xA100", 8192, 512, 5.0),
    Question("llama3-405b", "2048x8xH100", 8192, 2048, 5.0),
    Question("llama3-405b", "2048x8xH100", 131072, 128, 5.0),
    Question("deepseek-v3", "256x8xH100", 4096, 8192, 10.0),
)


COLUMNS = {
    "model": "model", "cluster": "cluster", ">sequence": "seq:,", ">batch": "batch:,",
    ">layouts evaluated": "weighed:,", ">seconds": "seconds:.2f", ">at most": "most:g",
}  # fmt: skip


def measure(rounds: int = 3) -> RowsResult:
    rows = [question._asdict() | time_search(question, rounds) for question in QUESTIONS]
    return RowsResult(rows, COLUMNS, f"median of {rounds} cold searches")


def time_search(question: Question, rounds: int) -> dict[str, Any]:
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
        if name.startswith(("fivefold.plan.", "fivefold.layout.", "fivefold.schedule.")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
