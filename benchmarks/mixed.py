"""`python -m benchmarks.mixed`: ranks of unequal speed, and what a split by speed and a schedule made for it gain.

Half of the ranks are slowed (`slow.py`). All are measured while they run (`calibrate --ranks`), the planner divides
the layers and predicts every step from those speeds alone, and then the steps are timed in turns, in one run.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer
from msgspec import structs

from benchmarks.slow import slowed
from fivefold.bench.baselines import LR
from fivefold.bench.comparison import base_job
from fivefold.bench.harness import Machine, OnProgress, RoundTimes, caveats, refuse, table, too_small
from fivefold.bench.rank_timing import CPU, join_ranks, machine, take_turns
from fivefold.cli import main, program
from fivefold.cli.measuring import Changes, measure_and_show
from fivefold.cli.options import Json
from fivefold.cost.software import ON_CPUS
from fivefold.cost.step import Workload, stage_passes
from fivefold.job.config import Job
from fivefold.launch import processes
from fivefold.launch.device import core_of
from fivefold.launch.processes import Rank
from fivefold.layout.layout import Layout
from fivefold.machines import calibrate
from fivefold.machines.result import RankSpeed, RanksResult
from fivefold.parallel.mesh import Mesh
from fivefold.planner.mixed import groups_of
from fivefold.planner.mixed_compare import best_split
from fivefold.planner.option import Option, evaluate
from fivefold.planner.search import trained_layout
from fivefold.render.blocks import Block, Result, Text
from fivefold.schedules.registry import record_of
from fivefold.support.errors import UserError
from fivefold.support.text import plural
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import plain_batch

EVEN, AUTO = "1f1b, even split", "auto"
SYSTEMS = (EVEN, "1f1b", "zb-h1", "zb-v", AUTO)
# Small vocabulary: the head is a layer that no split can balance. Sixteen layers leave the planner something to divide.
SIZES = ("model.layers=16", "model.vocab=1024", "data.seq=128")
SHORTEST = 0.02  # seconds of a stage's forward pass: shorter ones are not long beside the periods of `slow`
AGREE = 1e-5  # relative, of the losses of all steps
FACTORS = (1.05, 8.0)
_PATIENCE = 600.0  # seconds for a step
COLUMNS = {
    ">slower": "slower:.2f", "~schedule": "system", "~layers": "layers", ">planned": "planned_seconds:.3f",
    ">gain": "planned_gain:.2f", ">measured": "seconds:.3f", "> gain": "gain:.2f",
}  # fmt: skip


@dataclass(frozen=True)
class MixedTask:
    """What ranks of unequal speed run: `layouts` by system."""

    job: Job
    factors: tuple[float, ...]  # by rank
    layouts: Mapping[str, Layout]
    rounds: int
    quick: bool = False  # speeds from fewer rounds


class Planned(NamedTuple):
    """What the planner says of a system."""

    layout: Layout
    layers: tuple[int, ...]  # by stage
    seconds: float  # of a step
    shortest: float  # seconds of the shortest forward pass of a stage that has layers

    @classmethod
    def of(cls, option: Option, layout: Layout) -> "Planned":
        layers = tuple(len(stage.layers) for stage in option.workload.stages)
        stages = zip(stage_passes(option.workload), layers, strict=True)
        return cls(layout, layers, option.seconds, min(passes.forward.total for passes, count in stages if count))


@dataclass(frozen=True)
class MixedRun:
    """One factor: what the ranks' speeds are, and the steps that they took."""

    factor: float  # that was asked for
    speeds: RanksResult
    planned: Mapping[str, Planned]
    seconds: RoundTimes
    losses: Mapping[str, Sequence[float]]  # of all steps of a system

    @property
    def slower(self) -> float:
        """Times that the slowed ranks take as long as the others, as measured."""
        seconds = [median(speed.seconds) for speed in self.speeds.speeds]
        half = len(seconds) // 2
        return median(seconds[half:]) / median(seconds[:half])

    @property
    def apart(self) -> float:
        """How far the losses of two systems lie apart, relatively, in the step in which they do so most."""
        steps = zip(*self.losses.values(), strict=True)
        return max((max(losses) - min(losses)) / max(map(abs, losses)) for losses in steps)

    @property
    def shortest(self) -> float:
        return min(plan.shortest for plan in self.planned.values())

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self._row(system) for system in self.seconds]

    def _row(self, system: str) -> dict[str, Any]:
        planned, even = self.planned[system], self.planned[EVEN]
        return {
            "asked": self.factor,
            "slower": self.slower,
            "system": system,
            "layers": ",".join(map(str, planned.layers)),
            "planned_seconds": planned.seconds,
            "planned_gain": even.seconds / planned.seconds,
            "seconds": self.seconds.median(system),
            "fastest": min(self.seconds[system]),
            "slowest": max(self.seconds[system]),
            "gain": self.seconds.ratio(EVEN, system),
            "loss": self.losses[system][-1],
        }


@dataclass(frozen=True)
class MixedBenchResult(Result):
    job: Job
    ranks: int
    rounds: int
    machine: Machine
    runs: Sequence[MixedRun]

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return all(run.apart <= AGREE for run in self.runs)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for run in self.runs for row in run.rows]

    def to_dict(self) -> dict[str, Any]:
        job, here = self.job, self.machine
        setup = {
            "bench": "mixed", "ranks": self.ranks, "parameters": job.model.parameter_count, "layers": job.model.layers,
            "hidden": job.model.hidden, "seq": job.data.seq, "batch": job.train.batch,
            "microbatches": job.layout.microbatches, "rounds": self.rounds, "cores": here.cores,
            "machine": here.name, "torch": here.torch,
        }  # fmt: skip
        runs = [
            {"asked": run.factor, "speeds": run.speeds.to_dict(), "losses": run.losses, "apart": run.apart,
             "shortest_forward": run.shortest, "seconds": run.seconds} for run in self.runs
        ]  # fmt: skip
        return setup | {"agree": self.ok, "rows": self.rows, "runs": runs}

    def blocks(self) -> Iterator[Block]:
        job, here, model = self.job, self.machine, self.job.model
        size = f"{model.layers} layers of {model.hidden} ({model.parameter_count / 1e6:.1f}M parameters)"
        slow = plural(self.ranks - self.ranks // 2, "rank")
        yield Text(
            f"pp={self.ranks}, the last {slow} slowed; {size}; {job.layout.microbatches} microbatches of "
            f"{job.train.batch // job.layout.microbatches} x {job.data.seq} tokens, {job.train.dtype}, AdamW\n"
            f"torch {here.torch}, {here.cores} cores of {here.name}, a thread a rank; "
            f"{plural(self.rounds, 'round')} in turns, medians"
        )
        yield table(self.rows, COLUMNS)
        yield Text(
            "slower: times that a block takes as long on the slow ranks, as calibrate --ranks has it; planned and "
            "measured: seconds of a step; gain: speed over 1f1b with an even split, planned and measured"
        )
        steps, apart = len(next(iter(self.runs[0].losses.values()))), max(run.apart for run in self.runs)
        same = f"the losses of all {steps} steps are the same in all systems"
        yield (
            Text(f"{same}, within {max(apart, 1e-16):.0e}", "good")
            if self.ok
            else Text(f"the losses differ by {apart:.0e}, and may by {AGREE:.0e}", "bad")
        )
        if (shortest := min(run.shortest for run in self.runs)) < SHORTEST:
            yield Text(
                f"the shortest stage takes {shortest * 1e3:.1f} ms forward, less than {SHORTEST * 1e3:.0f}: too short "
                "beside the 2 ms periods in which ranks are slowed; take a larger model, or longer sequences"
            )
        yield from caveats(
            [times for run in self.runs for times in run.seconds.values()], self.rounds, self.ranks, here.cores
        )


def measure(
    changes: list[str], ranks: int, slow: str, microbatches: int, rounds: int, quick: bool, on_progress: OnProgress
) -> Iterator[MixedBenchResult]:
    """The result after each factor of `slow`, with all that was measured until then."""
    factors = _factors(slow)
    refuse(too_small(rounds=rounds, microbatches=microbatches))
    if ranks < 2:
        raise UserError(f"--ranks {ranks} leaves nobody to be slower than; nearest: --ranks 2")
    job = base_job([*SIZES, f"train.batch={microbatches}", *changes], microbatches=microbatches)
    layouts = [Layout(pp=ranks, schedule=name, microbatches=microbatches) for name in ("1f1b", "zb-v")]
    batch = job.train.batch
    refuse(list(dict.fromkeys(why for layout in layouts for why in layout.problems(job.model, batch=batch))))
    runs: list[MixedRun] = []
    for factor in factors:
        by_rank = tuple(factor if rank >= ranks // 2 else 1.0 for rank in range(ranks))
        on_progress(f"the speeds of {ranks} ranks, {ranks - ranks // 2} of them slowed {factor:g} times")
        task = MixedTask(job, by_rank, {}, rounds, quick)
        speeds = RanksResult(processes.run(ranks, "benchmarks.mixed:measure_speed", task, timeout=_PATIENCE))
        with TemporaryDirectory(prefix="fivefold-mixed-") as home:
            on_progress("the planner's splits")
            planned = plans(job, speeds, ranks, Path(home, "auto.txt"))
            on_progress(f"{len(planned)} systems, {plural(rounds, 'round')} in turns")
            task = replace(task, layouts={system: plan.layout for system, plan in planned.items()})
            patience = _PATIENCE * (rounds + 2) * len(planned)
            seconds, losses, here = processes.run(ranks, "benchmarks.mixed:run", task, timeout=patience)[0]
        runs.append(MixedRun(factor, speeds, planned, seconds, losses))
        yield MixedBenchResult(job, ranks, rounds, here, tuple(runs))


def _factors(text: str) -> list[float]:
    least, most = FACTORS
    try:
        factors = [float(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--slow {text} is no list of factors; write for example --slow 1.5,2") from None
    if odd := [factor for factor in factors if not least <= factor <= most]:
        raise UserError(f"--slow {odd[0]:g} must be a factor between {least:g} and {most:g}; nearest: --slow 1.5")
    return list(dict.fromkeys(factors))


def plans(job: Job, speeds: RanksResult, ranks: int, file: Path) -> dict[str, Planned]:
    """Each system on ranks of these speeds. `auto`'s order goes into `file`, which the ranks read."""
    even = Layout(pp=ranks, microbatches=job.layout.microbatches)
    software, cluster = ON_CPUS.computing_in("fp32"), speeds.cluster
    workload = Workload(job.model, even, cluster, job.data.seq, job.train.batch, "fp32", software)
    workload = replace(workload, groups=groups_of(cluster, even))
    planned = {EVEN: Planned.of(evaluate(workload), even)}
    for name in SYSTEMS[1:]:
        layout = structs.replace(even, schedule=name, chunks=record_of(name).chunks)
        best = evaluate(best_split(replace(workload, layout=layout)))
        planned[name] = Planned.of(best, trained_layout(best, file))
    return planned


# ---- ranks ----------------------------------------------------------------------------------------------------------


WARM_UP = 2  # steps of each system before the timed ones; their losses count, too


class System:
    """The trainer's steps under one layout, each of a batch of its own; the same ones for every system."""

    def __init__(self, job: Job, layout: Layout):
        self.job = structs.replace(job, layout=layout)
        self.engine = Engine(self.job, Mesh.of(layout, CPU, spec=job.model))
        self.losses: list[float] = []

    def step(self) -> None:
        job, engine = self.job, self.engine
        batch = plain_batch(job.model.vocab, job.train.batch, job.data.seq, seed=len(self.losses))
        loss = engine.forward_backward(batch)
        engine.step(LR, engine.gradient_norm())
        engine.weights.wait_params()
        self.losses.append(loss.item())


def measure_speed(rank: Rank, task: MixedTask) -> RankSpeed:
    _settle(rank)
    with slowed(task.factors[rank.number]):
        return calibrate.rank_speed(CPU, rank.world, task.quick)


def run(rank: Rank, task: MixedTask) -> tuple[RoundTimes, dict[str, list[float]], Machine]:
    here = machine()
    _settle(rank)
    with slowed(task.factors[rank.number]):
        systems = {name: System(task.job, layout) for name, layout in task.layouts.items()}
        for system in systems.values():
            for _ in range(WARM_UP):
                system.step()
        seconds = take_turns({name: system.step for name, system in systems.items()}, task.rounds)
    return seconds, {name: system.losses for name, system in systems.items()}, here


def _settle(rank: Rank) -> None:
    """On a core of its own, where there are enough of them, so that only what slows it does."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted({min(core_of(Path("/sys"), cpu)) for cpu in os.sched_getaffinity(0)} & os.sched_getaffinity(0))
        if len(cores) >= rank.world:
            os.sched_setaffinity(0, {cores[rank.number]})
    join_ranks(rank)


# ---- command --------------------------------------------------------------------------------------------------------


def mixed(
    changes: Changes = None,
    ranks: Annotated[int, typer.Option(help="Pipeline ranks; the second half of them is slowed.")] = 2,
    slow: Annotated[str, typer.Option(help="How many times slower, with commas.")] = "1.5,2",
    microbatches: Annotated[int, typer.Option(help="Pieces of the batch, a sequence each.")] = 8,
    rounds: Annotated[int, typer.Option(help="Timed steps of each system; medians are shown.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Measure speeds in fewer rounds, less sure.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the figures here: .csv has the table, .json all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a plan for unequal ranks gains over 1F1B with an even split: predicted, and measured.

    For each factor, ranks are slowed and their speeds measured while all of them
    run, as by calibrate --ranks. From these the planner divides the layers for
    1f1b, zb-h1, zb-v and auto, and predicts each step. Then the steps are timed, in
    turns. All of them train the same model on the same batches, and their losses
    must be the same.

    [dim]Examples:[/]

      python -m benchmarks.mixed

      python -m benchmarks.mixed --ranks 4 --slow 1.5,2 --rounds 7 -o mixed.csv

      python -m benchmarks.mixed model.layers=8 --microbatches 4 --json
    """
    measure_and_show(
        lambda progress: measure(changes or [], ranks, slow, microbatches, rounds, quick, progress),
        as_json=as_json,
        output=output,
    )


app = program(mixed, (".csv", ".json"))

if __name__ == "__main__":
    from benchmarks import mixed as this_module  # by the name under which ranks unpickle its classes

    main(this_module.app)
