"""One rank of `python -m benchmarks.mixed`: on a core of its own, slowed if it is to be."""

import os
from pathlib import Path

from msgspec import structs

from fivefold.bench.harness import Machine, RoundTimes
from fivefold.bench.mixed import MixedTask
from fivefold.bench.slow import slowed
from fivefold.bench.systems import CPU, RATE, enter, machine, take_turns
from fivefold.job.config import Job
from fivefold.launch.device import core_of
from fivefold.launch.processes import Rank
from fivefold.layout.layout import Layout
from fivefold.machines.calibrate import measured
from fivefold.machines.result import RankSpeed
from fivefold.parallel.mesh import Mesh
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import plain_batch

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
        engine.step(RATE, engine.gradient_norm())
        engine.weights.ready()
        self.losses.append(loss.item())


def speeds(rank: Rank, task: MixedTask) -> RankSpeed:
    _settle(rank)
    with slowed(task.factors[rank.number]):
        return measured(CPU, rank.world, task.quick)


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
    enter(rank)
