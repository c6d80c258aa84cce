"""What the tests of the pipeline share: small jobs, an engine that is watched, and one process to hold it against."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fivefold.data.batch import Batch
from fivefold.data.shards import TokenShards
from fivefold.job.config import Job, TrainConfig
from fivefold.layout.layout import Layout
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Message
from fivefold.schedules.actions import Action
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.presets import preset
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import make_batch

CPU = torch.device("cpu")
StageMicrobatch = tuple[int, int]  # stage, microbatch


def job(layout: Layout, dtype: str = "float64", batch: int = 0, documents: bool = True, **model: Any) -> Job:
    """A layer for each stage and a sequence for each microbatch, where nothing else is said."""
    small = {"layers": layout.stages, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 37, "context": 8}
    return Job(
        model=preset("tiny", **small | model),
        layout=layout,
        data=TokenShards(seq=8, document_mask=documents),
        train=TrainConfig(batch=batch or layout.microbatches, dtype=dtype, device="cpu"),
    )


def all_schedules(p: int, microbatches: tuple[int, ...]) -> list[Layout]:
    """Every schedule at every number of microbatches that it can do, with one and two chunks where it has a choice."""
    found = []
    for name, record in CATALOGUE.items():
        for chunks in (1, 2) if record.any_chunks else (record.chunks,):
            for m in microbatches:
                layout = Layout(pp=p, schedule=name, chunks=chunks, microbatches=m)
                if not layout.problems(job(layout).model):
                    found.append(layout)
    return found


# ---- watching --------------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """What an engine did: its actions in order, and the most that it held."""

    actions: list[Action] = field(default_factory=list)
    live: Counter[StageMicrobatch] = field(
        default_factory=Counter
    )  # tensors that autograd has saved for a backward pass
    peak: int = 0  # places with any, or with put-off weight gradients
    in_flight: int = 0  # the most receives of one channel that are posted and not consumed
    engine: Engine | None = None

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        self.actions.append(action)
        place = action.stage, action.microbatch
        with saved_tensors_hooks(lambda tensor: Saved(tensor, self.live, place), lambda saved: saved.tensor):
            yield
        assert self.engine is not None
        pipeline = self.engine.pipeline
        held = {place for place, count in self.live.items() if count} | pipeline.deferred.keys()
        self.peak = max(self.peak, len(held))
        posted = Counter(key[:2] for key, here in pipeline.received.items() if isinstance(here, Message))
        self.in_flight = max(self.in_flight, *posted.values(), 0)


class Saved:
    """A tensor that autograd keeps; it counts itself as long as it lives."""

    def __init__(self, tensor: Tensor, live: Counter[StageMicrobatch], place: StageMicrobatch):
        # Parameters live anyway.
        self.tensor, self.live, self.place, self.counts = tensor, live, place, not isinstance(tensor, nn.Parameter)
        live[place] += self.counts

    def __del__(self) -> None:
        self.live[self.place] -= self.counts


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a rank saw."""

    loss: float
    evaluated: float
    gradients: dict[str, Tensor]
    watched: Watched
    pipeline_peak: int
    blocks: Counter[str]  # forward passes of each block


def run(case: Job, mesh: Mesh, batch: Batch | None = None) -> Run:
    """One accumulated batch; and the same batch, evaluated."""
    watched, blocks = Watched(), Counter[str]()
    engine = Engine(case, mesh, watched)
    watched.engine = engine
    for model in engine.stages.values():
        for number, block in model.layers.items():
            block.attention.register_forward_pre_hook(counting(blocks, number))
    batch = batch or make_batch(case, 0)
    loss = engine.forward_backward(batch).item()
    gradients = {name: gradient.clone() for name, gradient in gradients_of(engine).items()}
    counted, peak = Counter(blocks), engine.pipeline.peak
    return Run(loss, engine.evaluate(batch), gradients, watched, peak, counted)


def counting(blocks: Counter[str], number: str) -> Callable[..., None]:
    def came(*_: object) -> None:
        blocks[number] += 1

    return came


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """This rank's own; with dp = tp = cp = 1 they are whole."""
    return {name: master.grad for name, master in engine.weights.masters.items() if master.grad is not None}


def alone(case: Job) -> Run:
    """The same microbatches, one after another in one process."""
    layout = Layout(microbatches=case.layout.microbatches, recompute=case.layout.recompute)
    one = Job(model=case.model, layout=layout, data=case.data, train=case.train)
    return run(one, Mesh.of(layout, CPU))


class Meshes:
    """Meshes of one world for several layouts: process groups cost more than most of what runs on them."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], Mesh] = {}

    def of(self, layout: Layout, tied: bool = False) -> Mesh:
        if tied:
            return Mesh.of(layout, CPU)  # which ranks share an embedding depends on the schedule
        key = layout.dp, layout.tp, layout.cp, layout.pp
        if key not in self.made:
            self.made[key] = Mesh.of(layout, CPU)
        return replace(self.made[key], layout=layout)
