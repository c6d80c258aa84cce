"""How long planning takes: the whole search, on one core, in this process."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.layout.stages import _built, balanced
from fivefold.plan.cost.kernels import _waves
from fivefold.plan.cost.time import Case, _stages, stage_parameters
from fivefold.plan.cost.work import _method
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
    Question("llama3-405b", "2048x8xH100", 8192, 2048, 5.0),
    Question("llama3-405b", "2048x8xH100", 131072, 128, 5.0),
)


class Timing(NamedTuple):
    question: Question
    seconds: float
    weighed: int


def measure(question: Question, rounds: int = 3, clock: Callable[[], float] = perf_counter) -> Timing:
    """The median of cold searches: what earlier ones left behind is thrown away."""
    case = Case(preset(question.model), Layout(), Cluster.parse(question.cluster), question.seq, question.batch)
    times, weighed = [], 0
    for _ in range(rounds):
        for found_before in (_built, balanced, stage_parameters, _stages, _waves, _method):
            found_before.cache_clear()
        begin = clock()
        weighed = search(case).evaluated
        times.append(clock() - begin)
    return Timing(question, median(times), weighed)
