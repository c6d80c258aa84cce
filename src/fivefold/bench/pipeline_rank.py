"""One rank of the pipeline's benchmark: contenders take the same step in turns, so that all meet the same noise."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from fivefold.bench.pipeline import SCHEDULES, Result, Shape
from fivefold.bench.pipelining_stage import Placed
from fivefold.data.batch import Batch
from fivefold.job.config import DataConfig, Job, TrainConfig
from fivefold.launch.cores import cores
from fivefold.launch.ranks import Rank
from fivefold.layout.layout import Layout
from fivefold.layout.stages import stages_of
from fivefold.model.decoder import Decoder
from fivefold.model.loss import loss_sum
from fivefold.model.positions import TokenPositions
from fivefold.parallel.channels import Channels
from fivefold.parallel.gather_full import whole
from fivefold.parallel.mesh import Mesh
from fivefold.schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Kind
from fivefold.schedule.costs import Costs
from fivefold.schedule.simulate import simulate
from fivefold.train.engine import Engine
from fivefold.verify.batches import plain_batch

_CPU = torch.device("cpu")
Clock = dict[tuple[Kind, int], list[float]]


class Contender(Protocol):
    def step(self) -> None:
        """Forward and backward passes of the batch, until its gradients are final."""

    def gradients(self) -> dict[str, Tensor]:
        """Of this rank's stages, by global name."""

    def forget(self) -> None: ...


class Ours:
    """An engine under one schedule; under none, one process with the whole model."""

    def __init__(self, shape: Shape, batch: Batch, schedule: str | None = None):
        layout = shape.layout(schedule) if schedule else Layout(microbatches=shape.microbatches)
        data, train = DataConfig(seq=shape.seq), TrainConfig(batch=shape.batch, device="cpu")
        job = Job(model=shape.spec, layout=layout, data=data, train=train)
        self.clock: Clock | None = None
        self.durations: Clock = defaultdict(list)  # of compute on this rank, by kind and stage
        self.engine, self.batch = Engine(job, Mesh.of(layout, _CPU), self._watch), batch

    @contextmanager
    def _watch(self, action: Action) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.clock is not None:
            self.clock[action.kind, action.stage].append(time.perf_counter() - start)

    def step(self) -> None:
        self.engine.accumulate(self.batch)

    def gradients(self) -> dict[str, Tensor]:
        return {name: whole(one) for name, one in self.engine.gradients().items()}

    def forget(self) -> None:
        self.engine.weights.publish()

    def time_actions(self) -> None:
        """One step in which every rank computes as the schedule says, and none waits for another."""
        pipeline = self.engine.pipeline
        channels, pipeline.channels, self.clock = pipeline.channels, Mute(pipeline.channels), self.durations
        self.step()
        self.forget()
        pipeline.channels, self.clock = channels, None


class Mute(Channels):
    """Channels that send nothing, and have what is to be received at once."""

    def __init__(self, like: Channels):
        self.mesh, self.dtype = like.mesh, like.dtype

    def receive(self, action: Action, shape: tuple[int, ...]) -> Tensor:  # type: ignore[override]
        return torch.randn(shape, dtype=self.dtype)

    def send(self, action: Action, x: Tensor) -> None:
        pass

    def drain(self) -> None:
        pass


class Torchs:
    """The schedule of the same name in torch.distributed.pipelining, over plain stages of the same decoder."""

    def __init__(self, shape: Shape, batch: Batch, schedule: str, mesh: Mesh, like: Decoder):
        layout, spec = shape.layout(schedule), shape.spec
        stages, owner = stages_of(spec, layout, shape.seq), layout.placement.owner
        place = TokenPositions.of(torch.zeros(shape.batch // shape.microbatches, shape.seq, dtype=torch.int64))
        self.modules = [
            Placed(Decoder(spec, stage=stage), place) for stage in stages if owner[stage.index] == mesh.pp.rank
        ]
        weights = like.state_dict()
        for module in self.modules:
            module.decoder.load_state_dict({name: weights[name] for name in module.decoder.state_dict()})
        parts = [
            PipelineStage(module, module.decoder.stage.index, len(stages), _CPU, group=mesh.pp.group)
            for module in self.modules
        ]
        self.tokens, self.targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        count = batch.loss_tokens

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return loss_sum(logits, targets, torch.ones_like(targets, dtype=torch.bool)) / count

        kind = getattr(schedules, SCHEDULES[schedule])
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        self.schedule = kind(parts[0] if single else parts, shape.microbatches, loss, scale_grads=False)

    def step(self) -> None:
        ends = [module.decoder.stage for module in self.modules]
        given = [self.tokens] if any(stage.first for stage in ends) else []
        last = any(stage.last for stage in ends)
        losses: list[Tensor] = []
        self.schedule.step(*given, target=self.targets if last else None, losses=losses, return_outputs=False)

    def gradients(self) -> dict[str, Tensor]:
        named = [pair for module in self.modules for pair in module.decoder.named_parameters()]
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}

    def forget(self) -> None:
        for module in self.modules:
            module.zero_grad(set_to_none=True)


def run(rank: Rank, shape: Shape) -> Result:
    torch.set_num_threads(1)
    rank.join("gloo")
    batch = plain_batch(shape.spec.vocab, shape.batch, shape.seq)
    alone = Ours(shape, batch)
    ours = {name: Ours(shape, batch, name) for name in SCHEDULES}
    mesh = ours["1f1b"].engine.mesh
    torchs = {name: Torchs(shape, batch, name, mesh, alone.engine.model) for name in SCHEDULES}
    contenders: dict[str, Contender] = {"one process": alone}
    for name in SCHEDULES:
        contenders |= {name: ours[name], f"torch {name}": torchs[name]}
    errors = _errors(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(shape.rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:  # what drifts meets first and last alike
            seconds[name].append(_time(contenders[name], together=name != "one process"))
        for one in ours.values():
            dist.barrier()
            one.time_actions()
    return Result(
        alone=seconds["one process"],
        ours={name: seconds[name] for name in SCHEDULES},
        torch={name: seconds[f"torch {name}"] for name in SCHEDULES},
        bubbles={name: simulate(one.engine.schedule, _costs(one)).bubble_makespan for name, one in ours.items()},
        errors=errors,
        cores=cores(),
        version=torch.__version__,
    )


def _time(contender: Contender, together: bool) -> float:
    """Of one step: until the slowest rank is done, or of ranks that do the same, each for itself, the mean."""
    dist.barrier()
    start = time.perf_counter()
    contender.step()
    if together:
        dist.barrier()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    contender.forget()
    dist.all_reduce(seconds)
    return seconds.item() / dist.get_world_size()


def _errors(contenders: dict[str, Contender]) -> dict[str, float]:
    """How far every contender's gradients lie from one process's; the first step of each is also its warm-up."""
    contenders["one process"].step()
    wanted, errors = contenders["one process"].gradients(), {}
    for name, contender in contenders.items():
        if name != "one process":
            dist.barrier()
            contender.step()
            pairs = [(one, wanted[key]) for key, one in contender.gradients().items()]
            worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
            found = torch.tensor(worst, dtype=torch.float64)
            dist.all_reduce(found, dist.ReduceOp.MAX)
            errors[name] = found.item()
            contender.forget()
    contenders["one process"].forget()
    return errors


def _costs(ours: Ours) -> Costs:
    """What compute costs on all ranks; collective."""
    everyone: list[dict[tuple[Kind, int], float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {place: median(times) for place, times in ours.durations.items()})
    known = {place: seconds for rank in everyone for place, seconds in rank.items()}
    stages = range(ours.engine.schedule.placement.stages)
    f, i, w, b = (
        tuple(known.get((kind, stage), 0.0) for stage in stages)
        for kind in (FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD)
    )
    return Costs(f, i, w, b, activation=(1.0,) * len(stages))
