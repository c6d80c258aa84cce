"""One rank of a proof: run the layout, compare every step with the reference, count traffic. And one of a loss curve.

Every rank compares for itself what its stages hold: ranks that hold the same thing may disagree, and one of them is
then wrong.
"""

import gc
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from fivefold.data.batch import Batch
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.launch.device import choose_backend, choose_device, make_repeatable
from fivefold.launch.processes import Rank, named
from fivefold.model.decoder import Decoder
from fivefold.model.recompute import compilation, is_recomputing
from fivefold.optim.base import learning_rate
from fivefold.parallel.collectives import digest, full_tensor
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic import TrafficCounter
from fivefold.trainer.engine import Engine, mixtures
from fivefold.trainer.ledger import Ledger
from fivefold.trainer.loop import Trainer
from fivefold.verifier import compare
from fivefold.verifier.cases import make_batch
from fivefold.verifier.compare import Error, bias, counts, router_name
from fivefold.verifier.reference import Reference
from fivefold.verifier.verdict import RankMeasurement, RoutedLayer

# ---- routing --------------------------------------------------------------------------------------------------------
# Where the ranks of a layout send tokens, held against where the reference sent them.
#
# A token is known by its sample and its position. Every layer must send it to the experts that one process sent it to,
# and over all ranks exactly once. In float64 ranks choose for themselves. In narrower dtypes a rounding can decide
# between two experts of nearly the same score, and then everything after it differs: there the reference's choice is
# replayed, and tokens for which ranks would have chosen others are counted: no more than rounding explains.


@dataclass
class _Seen:
    """Of one layer, in one step."""

    first: int  # the number of the batch's first sample
    wanted: Tensor  # [B, S, K] what the reference chose, best first
    visits: NDArray[np.int64]  # [B, S] how often this rank routed each token
    found: list[Tensor]  # rows of (sample, position, experts...) that differ


class RouteRecorder:
    """Looks over the shoulders of the routers of this rank's stages."""

    def __init__(self, stages: Iterable[Decoder], replay: bool):
        self.replay, self.here = replay, torch.empty(0)
        self.mixtures = mixtures(stages)
        self.seen: dict[int, _Seen] = {}
        for layer, mixture in self.mixtures.items():
            # Between graphs: inside, a recomputed block would have others in its second run, which counts nothing.
            aside = torch.compiler.disable if mixture.ops.compiled else lambda function: function
            mixture.register_forward_pre_hook(aside(self._meet))
            mixture.router.choose = aside(self._watched(layer, mixture.router))

    def begin(self, samples: NDArray[np.int64], routing: dict[int, Tensor]) -> None:
        """A step begins, with these samples; `routing` is the reference's."""
        self.seen = {
            layer: _Seen(int(samples[0]), routing[layer], np.zeros(routing[layer].shape[:2], np.int64), [])
            for layer in self.mixtures
        }

    @torch.no_grad()
    def _meet(self, mixture: Any, inputs: tuple[Any, ...]) -> None:
        """Which samples and positions the tokens have that this rank routes: its dispatch deals them out like any."""
        _, positions = inputs
        places = torch.stack([positions.samples[:, None].expand_as(positions.position_ids), positions.position_ids], -1)
        self.here = mixture.ops.dispatch.own_tokens(places)

    def _watched(self, layer: int, router: Any) -> Callable[[Tensor], Tensor]:
        choose = router.choose or router.best

        @torch.no_grad()
        def watched(scores: Tensor) -> Tensor:
            own, seen = choose(scores), self.seen[layer]
            samples, positions = self.here.cpu().unbind(-1)
            rows = samples - seen.first
            wanted = seen.wanted[rows, positions]
            if not is_recomputing():
                np.add.at(seen.visits, (rows.numpy(), positions.numpy()), 1)
                differ = (own.cpu().sort(-1).values != wanted.sort(-1).values).any(-1)
                seen.found.append(torch.column_stack([samples, positions, own.cpu()])[differ])
            return wanted.to(own.device) if self.replay else own

        return watched

    def end(self, step: int) -> list[RoutedLayer]:
        """What this rank routed."""
        found = ((layer, seen, torch.cat(seen.found)) for layer, seen in self.seen.items() if seen.found)
        return [
            RoutedLayer(step, router_name(layer), seen.visits, len(strays), seen.first, _words(seen, strays))
            for layer, seen, strays in found
        ]

    def balances(self) -> dict[str, Tensor]:
        """The numbers that help experts to be chosen, by name."""
        found = {layer: mixture.router.balance for layer, mixture in self.mixtures.items()}
        return {f"{router_name(n)}.balance": one.cpu().clone() for n, one in found.items() if one is not None}

    def biases(self, step: int, wanted: dict[str, Tensor], rate: float, bound: float) -> list[Error]:
        """The same, after a step, against the reference's."""
        return [bias(name, step, one, wanted[name], rate, bound) for name, one in self.balances().items()]


def loads(step: int, found: Tensor, routing: dict[int, Tensor]) -> list[Error]:
    """The tokens of each expert, summed over ranks: [layers with experts, X]."""
    return [
        counts(
            router_name(layer),
            step,
            row.to(torch.int64),
            torch.bincount(chosen.flatten(), minlength=len(row)),
        )
        for row, (layer, chosen) in zip(found.cpu(), sorted(routing.items()), strict=True)
    ]


def _words(seen: _Seen, strays: Tensor) -> str:
    if not len(strays):
        return ""
    sample, position, *experts = strays[0].tolist()
    wanted = seen.wanted[sample - seen.first, position].tolist()
    token = f"sample {sample}, position {position}"
    return f"sends {token} to experts {_list(experts)}, and one process to {_list(wanted)}"


def _list(experts: list[int]) -> str:
    return ", ".join(map(str, experts))


# ---- measure --------------------------------------------------------------------------------------------------------


def measure(rank: Rank, job: Job, reference: Path, hook: str = "") -> RankMeasurement:
    """`hook` names a function, "module:name", that is called first: a test plants a bug with it."""
    if rank.world > 1:
        device = choose_device(job.train.device, rank.number)
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    if hook:
        named(hook)()
    return compared(rank, job, reference)


def measure_each(rank: Rank, jobs: list[Job], references: list[Path], hook: str = "") -> Generator[RankMeasurement]:
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


def compared(rank: Rank, job: Job, reference: Path) -> RankMeasurement:
    """Of a rank that has joined the others."""
    device = choose_device(job.train.device, rank.number)
    mesh = Mesh.of(job.layout, device, spec=job.model)
    engine, wanted = Engine(job, mesh), Reference.load(reference)
    bound, measured, counter = compare.bound_of(job), RankMeasurement(strays=wanted.strays), TrafficCounter(mesh)
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
            loss, norm = engine.forward_backward(batch), engine.gradient_norm()
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
    return {name: full_tensor(tensor) for name, tensor in sorted(tensors.items())}
