"""One rank of a proof: run the layout, compare every step with the reference, count traffic. And one of a loss curve.

Every rank compares for itself what its stages hold: ranks that hold the same thing may disagree, and one of them is
then wrong.
"""

import gc
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from fivefold.data.batch import Batch
from fivefold.job.config import Job
from fivefold.job.learning_rate import learning_rate
from fivefold.job.preflight import preflight
from fivefold.launch.device import choose_backend, choose_device, make_repeatable
from fivefold.launch.processes import named
from fivefold.launch.ranks import Rank
from fivefold.model.compiled import compilation
from fivefold.parallel.collectives import digest, whole
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic import TrafficCounter
from fivefold.train.engine import Engine
from fivefold.train.loop import Trainer
from fivefold.train.memory_ledger import Ledger
from fivefold.verify import compare
from fivefold.verify.batches import make_batch
from fivefold.verify.reference import Reference
from fivefold.verify.routing import RouteRecorder, loads
from fivefold.verify.verdict import Measured


def measure(rank: Rank, job: Job, reference: Path, hook: str = "") -> Measured:
    """`hook` names a function, "module:name", that is called first: a test plants a bug with it."""
    if rank.world > 1:
        device = choose_device(job.train.device, rank.number)
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    if hook:
        named(hook)()
    return compared(rank, job, reference)


def measure_each(rank: Rank, jobs: list[Job], references: list[Path], hook: str = "") -> Generator[Measured]:
    """Several in turn, by ranks that stay up: on a GPU they take longer to start than most layouts do to prove."""
    for number, (job, reference) in enumerate(zip(jobs, references, strict=True)):
        home = rank.home / str(number)
        home.mkdir(exist_ok=True)
        measured = measure(Rank(rank.number, rank.world, home), job, reference, "" if number else hook)
        _forget_groups()  # before it counts: what breaks here is this layout's
        yield measured


def _forget_groups() -> None:
    """Leave the process group, and whatever knows its groups by name."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    if torch.cuda.is_initialized():
        _Forget.apply(torch.ones((), device="cuda", requires_grad=True)).backward()
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Forget(Function):
    """DTensor remembers results of its ops by thread, with groups' names: those of a GPU's backward passes, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _clear_sharding_prop_cache()
        return gradient


def compared(rank: Rank, job: Job, reference: Path) -> Measured:
    """Of a rank that has joined the others."""
    device = choose_device(job.train.device, rank.number)
    mesh = Mesh.of(job.layout, device, spec=job.model)
    engine, wanted = Engine(job, mesh), Reference.load(reference)
    bound, measured, counter = compare.bound_of(job), Measured(strays=wanted.strays), TrafficCounter(mesh)
    ledger = Ledger(engine, counter)
    # Under a counter nothing runs compiled: then it is the numbers that are proven, and those that count stay outside.
    counted: list[AbstractContextManager[Any]] = [ledger, counter]
    first, others = [nullcontext(), nullcontext()] if engine.compiled else counted
    recorder = RouteRecorder(engine.stages.values(), compare.replays(job))
    mine = {name for model in engine.stages.values() for name in model.stage.names(job.model)}
    for step, target in enumerate(wanted.steps, start=1):
        batch = make_batch(job, step - 1)
        recorder.begin(batch.samples, target.routing)
        with first if step == 1 else others:
            loss, norm = engine.accumulate(batch), engine.gradient_norm()
        if step == 1:
            held = engine.weights.resident()  # when gradients are complete
            measured.held.update(
                {
                    "parameters": held["parameters"],
                    "gradients": held["gradients"],
                    "optimizer": held["masters"] + engine.optimizer.resident(),
                    "microbatches in flight": engine.pipeline.peak,
                    "peak": ledger.peak,
                    "flops": ledger.flops,
                }
            )
        measured.losses.append((loss.item(), target.loss))
        measured.norms.append((norm.item(), target.norm))
        measured.errors.append(compare.number("loss", step, loss.item(), target.loss, bound))
        measured.errors.append(compare.number("norm", step, norm.item(), target.norm, bound))
        gradients = {name: target.gradients[name] for name in target.gradients if name in mine}
        found = _whole(engine.gradients())
        measured.errors.extend(compare.gradients(found, gradients, step, bound, job.model, target.zeros, wanted.noise))
        measured.routed.extend(recorder.end(step))
        if engine.loads is not None:
            measured.errors.extend(loads(step, engine.loads.tokens, target.routing))
        rate = learning_rate(job.optimizer, step - 1, job.train.steps)
        with others:
            engine.step(rate if batch.loss_tokens else None, norm)
        measured.errors.extend(recorder.biases(step, target.biases, job.train.balance_rate, bound))
    with others:
        engine.weights.ready()  # weights that would have been gathered under the next forward
    measured.traffic.extend(counter.rows())
    if engine.compiled:
        measured.graphs.append(compilation())
    found = _whole(engine.parameters())
    parameters = {name: wanted.parameters[name] for name in wanted.parameters if name in mine}
    measured.errors.extend(compare.parameters(found, parameters, job, bound))
    measured.digests.update({name: digest(one) for name, one in (found | recorder.balances()).items()})
    return measured


def curve(rank: Rank, job: Job, shuffled: bool) -> tuple[list[float | None], dict[str, str]]:
    """The loss of every step, and a digest of each weight that this rank's stages started from."""
    device = choose_device(job.train.device, rank.number)
    make_repeatable(job.train)
    if rank.world > 1:
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    trainer = Trainer(job, preflight(job, rank.world), Mesh.of(job.layout, device, spec=job.model))
    start = {name: digest(weight) for name, weight in _whole(trainer.engine.parameters()).items()}
    losses = []
    for step, read in enumerate(trainer.reads(whole=shuffled), start=1):
        batch = read()
        losses.append(trainer.step(step, _shuffle(batch.mine, step) if shuffled else batch).loss)
    return losses, start


def _shuffle(batch: Batch, seed: int) -> Batch:
    """The same samples in another order, and so in other microbatches."""
    order = np.random.default_rng(seed).permutation(len(batch.samples))
    return Batch(**{field.name: getattr(batch, field.name)[order] for field in fields(batch)})


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Collective: every rank gathers the same names in the same order."""
    return {name: whole(tensor) for name, tensor in sorted(tensors.items())}
