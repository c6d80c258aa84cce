"""One rank of a proof: run the layout, compare every step with the reference, count traffic. And one of a loss curve.

Every rank compares for itself what its stages hold: ranks that hold the same thing may disagree, and one of them is
then wrong.
"""

import gc
from collections.abc import Callable, Generator
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
from fivefold.model.recompute import compilation, is_recomputing
from fivefold.optim.base import learning_rate
from fivefold.parallel.collectives import digest, full_tensor
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic import TrafficCounter
from fivefold.trainer.engine import Engine, RankModel, moe_layers
from fivefold.trainer.ledger import Ledger
from fivefold.trainer.loop import Trainer
from fivefold.verifier import compare
from fivefold.verifier.cases import reader
from fivefold.verifier.compare import Error, router_name
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
class _LayerRecord:
    """Of one layer, in one step."""

    first: int  # the number of the batch's first sample
    expected: Tensor  # [B, S, K] what the reference chose, best first
    visits: NDArray[np.int64]  # [B, S] how often this rank routed each token
    strays: list[Tensor]  # rows of (sample, position, experts...) that differ


class RouteRecorder:
    """Records what the routers of this rank's stages choose, and may replay the reference's choice instead."""

    def __init__(self, network: RankModel, replay: bool):
        self.weights, self.replay = network.weights, replay
        self.tokens = torch.empty(0)  # [n, 2] sample and position of the tokens that a mixture is about to route
        self.moe_layers = moe_layers(network.stages.values())
        self.records: dict[int, _LayerRecord] = {}
        for layer, mixture in self.moe_layers.items():
            # Between graphs: inside, a recomputed block would have others in its second run, which counts nothing.
            aside = torch.compiler.disable if mixture.ops.compiled else lambda function: function
            mixture.register_forward_pre_hook(aside(self._note_tokens))
            mixture.router.choose = aside(self._recorded(layer, mixture.router))

    def begin(self, samples: NDArray[np.int64], routing: dict[int, Tensor]) -> None:
        """A step begins, with these samples; `routing` is the reference's."""
        self.records = {
            layer: _LayerRecord(int(samples[0]), routing[layer], np.zeros(routing[layer].shape[:2], np.int64), [])
            for layer in self.moe_layers
        }

    @torch.no_grad()
    def _note_tokens(self, mixture: Any, inputs: tuple[Any, ...]) -> None:
        """Which samples and positions the tokens have that this rank routes: its dispatch slices any tensor alike."""
        _, positions = inputs
        places = torch.stack([positions.samples[:, None].expand_as(positions.position_ids), positions.position_ids], -1)
        self.tokens = mixture.ops.dispatch.own_tokens(places)

    def _recorded(self, layer: int, router: Any) -> Callable[[Tensor], Tensor]:
        """The router's choice, recorded."""
        choose = router.choose or router.top_k

        @torch.no_grad()
        def recorded(scores: Tensor) -> Tensor:
            chosen, record = choose(scores), self.records[layer]
            samples, positions = self.tokens.cpu().unbind(-1)
            rows = samples - record.first
            expected = record.expected[rows, positions]
            # A replay, by which stages of a pipeline are compiled before the first step, is no part of a step.
            if not is_recomputing() and not self.weights.replaying:
                np.add.at(record.visits, (rows.numpy(), positions.numpy()), 1)
                differ = (chosen.cpu().sort(-1).values != expected.sort(-1).values).any(-1)
                record.strays.append(torch.column_stack([samples, positions, chosen.cpu()])[differ])
            return expected.to(chosen.device) if self.replay else chosen

        return recorded

    def end(self, step: int) -> list[RoutedLayer]:
        """What this rank routed."""
        layers = []
        for layer, record in self.records.items():
            if record.strays:
                strays = torch.cat(record.strays)
                note = _stray_note(record, strays)
                layers.append(RoutedLayer(step, router_name(layer), record.visits, len(strays), record.first, note))
        return layers

    def balances(self) -> dict[str, Tensor]:
        """The biases that count for the choice of experts, by name."""
        biases = {router_name(layer): mixture.router.balance for layer, mixture in self.moe_layers.items()}
        return {f"{name}.balance": bias.cpu().clone() for name, bias in biases.items() if bias is not None}

    def biases(self, step: int, expected: dict[str, Tensor], rate: float, bound: float) -> list[Error]:
        """The same, after a step, against the reference's."""
        return [
            compare.bias(name, step, actual, expected[name], rate, bound) for name, actual in self.balances().items()
        ]


def loads(step: int, tokens_per_expert: Tensor, routing: dict[int, Tensor]) -> list[Error]:
    """The tokens of each expert, summed over ranks: [layers with experts, X]."""
    errors = []
    for counts, (layer, chosen) in zip(tokens_per_expert.cpu(), sorted(routing.items()), strict=True):
        expected = torch.bincount(chosen.flatten(), minlength=len(counts))
        errors.append(compare.counts(router_name(layer), step, counts.to(torch.int64), expected))
    return errors


def _stray_note(record: _LayerRecord, strays: Tensor) -> str:
    if not len(strays):
        return ""
    sample, position, *experts = strays[0].tolist()
    expected = record.expected[sample - record.first, position].tolist()
    token = f"sample {sample}, position {position}"
    return f"sends {token} to experts {_list(experts)}, and one process to {_list(expected)}"


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
    return compare_steps(rank, job, reference)


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


def compare_steps(rank: Rank, job: Job, path: Path) -> RankMeasurement:
    """Run and compare all steps, on a rank that has joined the others; the reference is a file."""
    device = choose_device(job.train.device, rank.number)
    mesh = Mesh.of_job(job, device)
    engine, reference = Engine(job, mesh), Reference.load(path)
    bound, measured, counter = compare.bound_of(job), RankMeasurement(strays=reference.strays), TrafficCounter(mesh)
    ledger = Ledger(engine, counter)
    # Under a counter nothing runs compiled: then it is the numbers that are proven, and those that count stay outside.
    counted: list[AbstractContextManager[Any]] = [ledger, counter]
    first, others = [nullcontext(), nullcontext()] if engine.compiled else counted
    recorder = RouteRecorder(engine, compare.replays(job))
    local = {name for model in engine.stages.values() for name in model.stage.names(job.model)}
    read = reader(job, mesh.batch.size, mesh.batch.rank)
    for step, target in enumerate(reference.steps, start=1):
        batch = read(step - 1)
        recorder.begin(batch.samples, target.routing)
        with first if step == 1 else others:
            loss, norm = engine.forward_backward(batch), engine.gradient_norm()
        if step == 1:
            resident = engine.weights.resident()  # when gradients are complete
            measured.memory.update(
                {
                    "parameters": resident["parameters"],
                    "gradients": resident["gradients"],
                    "optimizer": resident["masters"] + engine.optimizer.resident(),
                    "microbatches in flight": engine.pipeline.peak,
                    "peak": ledger.peak,
                    "flops": ledger.flops,
                }
            )
        measured.losses.append((loss.item(), target.loss))
        measured.norms.append((norm.item(), target.norm))
        measured.errors.append(compare.number("loss", step, loss.item(), target.loss, bound))
        measured.errors.append(compare.number("norm", step, norm.item(), target.norm, bound))
        actual, expected = _full(engine.gradients()), {n: g for n, g in target.gradients.items() if n in local}
        measured.errors.extend(
            compare.gradients(actual, expected, step, bound, job.model, target.zeros, reference.noise)
        )
        measured.routed.extend(recorder.end(step))
        if engine.expert_loads is not None:
            measured.errors.extend(loads(step, engine.expert_loads.tokens, target.routing))
        rate = learning_rate(job.optimizer, step - 1, job.train.steps)
        with others:
            engine.step(rate if batch.loss_tokens else None, norm)
        measured.errors.extend(recorder.biases(step, target.biases, job.train.balance_rate, bound))
    with others:
        engine.weights.wait_params()  # weights that would have been gathered under the next forward
    measured.traffic.extend(counter.rows())
    if engine.compiled:
        measured.graphs.append(compilation())
    actual, expected = _full(engine.parameters()), {n: p for n, p in reference.parameters.items() if n in local}
    measured.errors.extend(compare.parameters(actual, expected, job, bound))
    measured.digests.update({name: digest(tensor) for name, tensor in (actual | recorder.balances()).items()})
    return measured


def curve(rank: Rank, job: Job, shuffled: bool) -> tuple[list[float | None], dict[str, str]]:
    """The loss of every step, and a digest of each weight that this rank's stages started from."""
    device = choose_device(job.train.device, rank.number)
    make_repeatable(job.train)
    if rank.world > 1:
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    trainer = Trainer(job, preflight(job, rank.world), Mesh.of_job(job, device))
    start = {name: digest(weight) for name, weight in _full(trainer.engine.parameters()).items()}
    losses = []
    for step, read in enumerate(trainer.reads(full=shuffled), start=1):
        batch = read()
        losses.append(trainer.step(step, _shuffle(batch.mine, step) if shuffled else batch).loss)
    return losses, start


def _shuffle(batch: Batch, seed: int) -> Batch:
    """The same samples in another order, and so in other microbatches."""
    order = np.random.default_rng(seed).permutation(len(batch.samples))
    return Batch(**{field.name: getattr(batch, field.name)[order] for field in fields(batch)})


def _full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Collective: every rank gathers the same names in the same order."""
    return {name: full_tensor(tensor) for name, tensor in sorted(tensors.items())}
