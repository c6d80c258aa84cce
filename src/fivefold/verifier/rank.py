"""One rank of a proof: runs the layout, compares every step with the reference, counts traffic. And of a loss curve.

Every rank compares the parameters of its own stages: replicas may differ, and one of them is then wrong.
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
from fivefold.launch.processes import Rank
from fivefold.launch.supervisor import import_function
from fivefold.model.compiler import compilation
from fivefold.model.recompute import is_recomputing
from fivefold.optim.lr_schedule import learning_rate
from fivefold.parallel.collectives import digest, full_tensor
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic_counter import TrafficCounter
from fivefold.spec.model import ModelSpec
from fivefold.trainer.engine import Engine, RankModel, moe_layers
from fivefold.trainer.ledger import Ledger
from fivefold.trainer.loop import Trainer
from fivefold.verifier.cases import reader
from fivefold.verifier.compare import (
    ValueComparison,
    compare_biases,
    compare_gradients,
    compare_loads,
    compare_parameters,
    compare_scalars,
    replays_routing,
    tolerance_of,
)
from fivefold.verifier.reference import Reference
from fivefold.verifier.verdict import RankMeasurement, RoutedLayer

# ---- routing --------------------------------------------------------------------------------------------------------
# Compares the experts to which a layout's ranks send each token with the reference's choice.
#
# A token is identified by its sample and its position. Every layer must send it to the experts that one process sent it
# to, and over all ranks exactly once. In float64 ranks choose for themselves. In narrower dtypes a rounding can decide
# between two experts of nearly the same score, and then everything after it differs: there the reference's choice is
# replayed. Tokens for which a rank's scores choose other experts (mismatched tokens) are counted; there may be no more
# than rounding explains.


@dataclass
class _LayerRecord:
    """The routing of one layer in one step."""

    first_sample: int  # the number of the batch's first sample
    expected: Tensor  # [B, S, K] the experts that the reference chose, best first
    visits: NDArray[np.int64]  # [B, S] how often this rank routed each token
    mismatched: list[Tensor]  # for each microbatch rows of (sample, position, experts chosen here...)


class RouteRecorder:
    """Records the experts that the routers of this rank's stages choose; with `replay` uses the reference's instead."""

    def __init__(self, network: RankModel, replay: bool):
        self.spec, self.weights, self.replay = network.job.model, network.weights, replay
        self.tokens = torch.empty(0)  # [n, 2] sample and position of the tokens that an MoE layer is about to route
        self.moe_layers = moe_layers(network.stages.values())
        self.records: dict[int, _LayerRecord] = {}
        for layer, moe in self.moe_layers.items():
            # Outside of graphs: inside, a recomputed block would compile to other graphs in its second run, as that is
            # not recorded.
            uncompiled = torch.compiler.disable if moe.ops.compiled else lambda function: function
            moe.register_forward_pre_hook(uncompiled(self._note_tokens))
            moe.router.choose = uncompiled(self._recording_choice(layer, moe.router))

    def begin(self, samples: NDArray[np.int64], routing: dict[int, Tensor]) -> None:
        """Begins the records of a step with these samples; `routing` is the reference's."""
        self.records = {
            layer: _LayerRecord(int(samples[0]), routing[layer], np.zeros(routing[layer].shape[:2], np.int64), [])
            for layer in self.moe_layers
        }

    @torch.no_grad()
    def _note_tokens(self, moe: Any, inputs: tuple[Any, ...]) -> None:
        """Notes sample and position of the tokens that this rank routes: its dispatch slices any tensor alike."""
        _, positions = inputs
        samples = positions.samples[:, None].expand_as(positions.position_ids)
        self.tokens = moe.ops.dispatch.own_tokens(torch.stack([samples, positions.position_ids], -1))

    def _recording_choice(self, layer: int, router: Any) -> Callable[[Tensor], Tensor]:
        """A function from scores to experts that takes the place of the router's, and records what it chooses."""
        choose = router.choose or router.top_k

        @torch.no_grad()
        def choose_and_record(scores: Tensor) -> Tensor:
            chosen, record = choose(scores), self.records[layer]
            samples, positions = self.tokens.cpu().unbind(-1)
            rows = samples - record.first_sample
            expected = record.expected[rows, positions]
            # Stages of a pipeline are compiled by replaying a microbatch before the first step: no part of a step.
            if not is_recomputing() and not self.weights.replaying:
                np.add.at(record.visits, (rows.numpy(), positions.numpy()), 1)
                differs = (chosen.cpu().sort(-1).values != expected.sort(-1).values).any(-1)
                record.mismatched.append(torch.column_stack([samples, positions, chosen.cpu()])[differs])
            return expected.to(chosen.device) if self.replay else chosen

        return choose_and_record

    def end(self, step: int) -> list[RoutedLayer]:
        """The tokens that this rank routed in a step, by layer."""
        layers = []
        for layer, record in self.records.items():
            if record.mismatched:
                mismatched, name = torch.cat(record.mismatched), self.spec.router(layer)
                note = _mismatch_note(record, mismatched)
                layers.append(RoutedLayer(step, name, record.visits, len(mismatched), record.first_sample, note))
        return layers

    def expert_biases(self) -> dict[str, Tensor]:
        """The biases that balance the experts, by name."""
        biases = {self.spec.router(layer): moe.router.balance for layer, moe in self.moe_layers.items()}
        return {f"{name}.balance": bias.cpu().clone() for name, bias in biases.items() if bias is not None}

    def compare_expert_biases(
        self, step: int, expected: dict[str, Tensor], rate: float, tolerance: float
    ) -> list[ValueComparison]:
        return [
            compare_biases(name, step, actual, expected[name], rate, tolerance)
            for name, actual in self.expert_biases().items()
        ]


def compare_expert_loads(
    spec: ModelSpec, step: int, tokens_per_expert: Tensor, routing: dict[int, Tensor]
) -> list[ValueComparison]:
    """Compares the tokens of each expert, summed over ranks: [layers with experts, X]."""
    comparisons = []
    for counts, (layer, chosen) in zip(tokens_per_expert.cpu(), sorted(routing.items()), strict=True):
        expected = torch.bincount(chosen.flatten(), minlength=len(counts))
        comparisons.append(compare_loads(spec.router(layer), step, counts.to(torch.int64), expected))
    return comparisons


def _mismatch_note(record: _LayerRecord, mismatched: Tensor) -> str:
    """A sentence on the first of the mismatched tokens."""
    if not len(mismatched):
        return ""
    sample, position, *experts = mismatched[0].tolist()
    expected = record.expected[sample - record.first_sample, position].tolist()
    token = f"sample {sample}, position {position}"
    return f"sends {token} to experts {_comma_list(experts)}, and one process to {_comma_list(expected)}"


def _comma_list(experts: list[int]) -> str:
    return ", ".join(map(str, experts))


# ---- measure --------------------------------------------------------------------------------------------------------


def measure(rank: Rank, job: Job, reference: Path, hook: str = "") -> RankMeasurement:
    """Joins the other ranks and compares the job with the reference.

    `hook` names a function, "module:name", that is called first: a test plants a bug with it.
    """
    if rank.world > 1:
        device = choose_device(job.train.device, rank.number)
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    if hook:
        import_function(hook)()
    return compare_steps(rank, job, reference)


def measure_each(rank: Rank, jobs: list[Job], references: list[Path], hook: str = "") -> Generator[RankMeasurement]:
    """Measures several jobs in turn, by ranks that stay up: on a GPU they take longer to start than most proofs do."""
    for number, (job, reference) in enumerate(zip(jobs, references, strict=True)):
        home = rank.home / str(number)
        home.mkdir(exist_ok=True)
        measured = measure(Rank(rank.number, rank.world, home), job, reference, "" if number else hook)
        _forget_groups()  # before the yield, so that an error here counts as this layout's
        yield measured


def _forget_groups() -> None:
    """Leaves the process group, and clears the caches of PyTorch that have its groups' names."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    if torch.cuda.is_initialized():
        _ClearCacheInBackward.apply(torch.ones((), device="cuda", requires_grad=True)).backward()
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _ClearCacheInBackward(Function):
    """DTensor caches results of its ops, with groups' names, by thread; backward on a GPU has a thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _clear_sharding_prop_cache()
        return gradient


def compare_steps(rank: Rank, job: Job, path: Path) -> RankMeasurement:
    """Runs and compares all steps, on a rank that has joined the others; `path` is the reference's file."""
    device = choose_device(job.train.device, rank.number)
    mesh = Mesh.of_job(job, device)
    engine, reference = Engine(job, mesh), Reference.load(path)
    tolerance, counter = tolerance_of(job), TrafficCounter(mesh)
    measured, ledger = RankMeasurement(reference_mismatches=reference.mismatched), Ledger(engine, counter)
    # Under a counter nothing runs compiled, so with compiled blocks memory and traffic are not counted.
    counters: list[AbstractContextManager[Any]] = [ledger, counter]
    if engine.compiled:
        counters = [nullcontext(), nullcontext()]
    first_step_counter, traffic_counter = counters  # the ledger counts memory and FLOPs, and traffic by its counter
    recorder = RouteRecorder(engine, replays_routing(job))
    local_names = {name for model in engine.stages.values() for name in model.stage.names(job.model)}
    read = reader(job, mesh.batch.size, mesh.batch.rank)
    for step, target in enumerate(reference.steps, start=1):
        batch = read(step - 1)
        recorder.begin(batch.samples, target.routing)
        with first_step_counter if step == 1 else traffic_counter:
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
        measured.comparisons.append(compare_scalars("loss", step, loss.item(), target.loss, tolerance))
        measured.comparisons.append(compare_scalars("norm", step, norm.item(), target.norm, tolerance))
        actual = _full_tensors(engine.gradients())
        expected = {name: gradient for name, gradient in target.gradients.items() if name in local_names}
        measured.comparisons.extend(
            compare_gradients(actual, expected, step, tolerance, job.model, target.zeros, reference.noise)
        )
        measured.routed.extend(recorder.end(step))
        if engine.expert_loads is not None:
            measured.comparisons.extend(
                compare_expert_loads(job.model, step, engine.expert_loads.tokens, target.routing)
            )
        lr = learning_rate(job.optimizer, step - 1, job.train.steps)
        with traffic_counter:
            engine.step(lr if batch.loss_tokens else None, norm)
        measured.comparisons.extend(
            recorder.compare_expert_biases(step, target.biases, job.train.balance_rate, tolerance)
        )
    with traffic_counter:
        engine.weights.wait_params()  # counts the all-gathers that overlap with the next forward
    measured.traffic.extend(counter.rows())
    if engine.compiled:
        measured.graphs.append(compilation())
    actual = _full_tensors(engine.parameters())
    expected = {name: parameter for name, parameter in reference.parameters.items() if name in local_names}
    measured.comparisons.extend(compare_parameters(actual, expected, job, tolerance))
    measured.digests.update({name: digest(tensor) for name, tensor in (actual | recorder.expert_biases()).items()})
    return measured


def curve(rank: Rank, job: Job, shuffled: bool) -> tuple[list[float | None], dict[str, str]]:
    """Trains, and returns the loss of every step and {weight: digest} at the start, of this rank's stages.

    `shuffled`: with the samples of every batch in another order.
    """
    device = choose_device(job.train.device, rank.number)
    make_repeatable(job.train)
    if rank.world > 1:
        rank.join(choose_backend(device, rank.world, job.train, rank.number))
    trainer = Trainer(job, preflight(job, rank.world), Mesh.of_job(job, device))
    start = {name: digest(weight) for name, weight in _full_tensors(trainer.engine.parameters()).items()}
    losses = []
    for step, read in enumerate(trainer.reads(full=shuffled), start=1):
        batch = read()
        losses.append(trainer.step(step, _shuffle(batch.mine, step) if shuffled else batch).loss)
    return losses, start


def _shuffle(batch: Batch, seed: int) -> Batch:
    """The same samples in another order, and so in other microbatches."""
    order = np.random.default_rng(seed).permutation(len(batch.samples))
    return Batch(**{field.name: getattr(batch, field.name)[order] for field in fields(batch)})


def _full_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gathers the tensors from their shards. Collective: every rank gathers the same names in the same order."""
    return {name: full_tensor(tensor) for name, tensor in sorted(tensors.items())}
