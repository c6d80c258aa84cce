"""One rank of `python -m benchmarks.pipeline`."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.bench.pipeline import SCHEDULES, PipelineResult, PipelineShape
from fivefold.bench.systems import CPU, TorchPipeline, enter, machine, take_turns
from fivefold.data.batch import Batch
from fivefold.launch.processes import Rank
from fivefold.model.head import loss_sum
from fivefold.model.ops import LocalOps
from fivefold.parallel.collectives import full_tensor
from fivefold.parallel.control import all_gather_values
from fivefold.parallel.mesh import Mesh
from fivefold.schedules.actions import Action, Kind
from fivefold.schedules.costs import Costs
from fivefold.schedules.simulate import simulate
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import plain_batch

ALONE = "one process"


class FivefoldPipeline:
    """An engine under one schedule; under none, one process with the whole model."""

    def __init__(self, shape: PipelineShape, batch: Batch, schedule: str | None = None):
        job = shape.job(schedule)
        self.timing = False
        # Seconds of compute on this rank, by kind and stage.
        self.durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        self.engine, self.batch = Engine(job, Mesh.of(job.layout, CPU, spec=job.model), self._watch), batch

    @contextmanager
    def _watch(self, action: Action) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.timing:
            self.durations[action.kind, action.stage].append(time.perf_counter() - start)

    def step(self) -> object:
        """Forward and backward passes of the batch, until its gradients are final."""
        return self.engine.forward_backward(self.batch)

    def gradients(self) -> dict[str, Tensor]:
        """Of this rank's stages, by global name."""
        return {name: full_tensor(one) for name, one in self.engine.gradients().items()}

    def reset(self) -> None:
        """Drop the gradients."""
        self.engine.weights.sync_params()

    def time_actions(self) -> None:
        """One step in which every rank computes as the schedule says, and none waits for another."""
        self.timing = True
        with self.engine.pipeline.alone():
            self.step()
        self.reset()
        self.timing = False

    def costs(self) -> Costs:
        """What compute costs on all ranks; collective."""
        mine = [(kind, stage, times) for (kind, stage), times in self.durations.items()]
        everyone = all_gather_values(mine, list[tuple[Kind, int, list[float]]])
        known = {(kind, stage): seconds for rank in everyone for kind, stage, seconds in rank}
        return Costs.measured(known, self.engine.schedule.placement.stages)


class Torchs(TorchPipeline):
    """The schedule of the same name in torch.distributed.pipelining, with our loss."""

    def __init__(self, shape: PipelineShape, batch: Batch, schedule: str):
        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return loss_sum(logits, targets, torch.ones_like(targets, dtype=torch.bool))

        super().__init__(shape.job(schedule), batch, SCHEDULES[schedule], loss, LocalOps())

    def gradients(self) -> dict[str, Tensor]:
        return {name: one.grad for name, one in self.parameters.items() if one.grad is not None}

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)


def run(rank: Rank, shape: PipelineShape) -> PipelineResult:
    enter(rank)
    batch = plain_batch(shape.spec.vocab, shape.batch, shape.seq)
    ours = {name: FivefoldPipeline(shape, batch, name) for name in SCHEDULES}
    systems: dict[str, FivefoldPipeline | Torchs] = {ALONE: FivefoldPipeline(shape, batch)}
    for name in SCHEDULES:
        systems |= {name: ours[name], f"torch {name}": Torchs(shape, batch, name)}
    errors = _errors(systems)

    def after(name: str) -> None:
        systems[name].reset()
        if name in ours:
            dist.barrier()
            ours[name].time_actions()

    seconds = take_turns({name: one.step for name, one in systems.items()}, shape.rounds, (ALONE,), after)
    here = machine()
    return PipelineResult(
        shape,
        alone=seconds[ALONE],
        ours={name: seconds[name] for name in SCHEDULES},
        torch={name: seconds[f"torch {name}"] for name in SCHEDULES},
        bubbles={name: simulate(one.engine.schedule, one.costs()).bubble_makespan for name, one in ours.items()},
        errors=errors,
        cores=here.cores,
        version=here.torch,
    )


def _errors(systems: dict[str, FivefoldPipeline | Torchs]) -> dict[str, float]:
    """How far every system's gradients lie from one process's; the first step of each is also its warm-up."""
    systems[ALONE].step()
    wanted, errors = systems[ALONE].gradients(), {}
    for name, system in systems.items():
        if name != ALONE:
            dist.barrier()
            system.step()
            pairs = [(one, wanted[key]) for key, one in system.gradients().items()]
            worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
            found = torch.tensor(worst, dtype=torch.float64)
            dist.all_reduce(found, dist.ReduceOp.MAX)
            errors[name] = found.item()
            system.reset()
    systems[ALONE].reset()
    return errors
