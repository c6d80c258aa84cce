"""`python -m benchmarks.plan`: how long the planner's whole search takes, on one core, in this process. With
`--against CHECKOUT`, whole commands of two checkouts in turn, and whether their answers are the same."""

import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks import plan_against
from fivefold.bench.harness import RowsResult
from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.cost.step import Workload
from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.planner.search import search
from fivefold.render.blocks import show
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
    workload = Workload(preset(question.model), Layout(), Cluster.parse(question.cluster), question.seq, question.batch)
    times, evaluated = [], 0
    for _ in range(rounds):
        empty_caches()
        begin = perf_counter()
        evaluated = search(workload).evaluated
        times.append(perf_counter() - begin)
    return {"seconds": median(times), "weighed": evaluated}


def empty_caches() -> None:
    """Of every function that planning calls."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fivefold.planner.", "fivefold.layout.", "fivefold.schedules.")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def plan(
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Searches of each kind; medians are shown.")] = 3,
    against: Annotated[Path | None, typer.Option(help="Another checkout: time its commands in turn with ours.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="With --against: compare answers to 40 questions instead.")
    ] = False,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time the planner's whole search, in this process, on one core.

    [dim]Examples:[/]

      python -m benchmarks.plan

      python -m benchmarks.plan --against ../before --rounds 5

      python -m benchmarks.plan --against ../before --compare
    """
    if against is None:
        result = measure(rounds)
    else:
        result = plan_against.answers(against) if compare else plan_against.times(against, rounds)
    show(result, as_json=as_json, output=output)


app = program(plan)

if __name__ == "__main__":
    main(app)
