"""What one device computes: the plain decoder, stock autograd, torch's own optimizer, the whole global batch at once.

This file imports nothing from `parallel/`, nor the engine and the optimizer that are being judged. The decoder's
experts are `PlainMoE`. Where they send tokens is written down, and runs that measure rounding repeat it.
"""

from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fivefold.cost.routing import Routing
from fivefold.data.batch import Batch, DpShare
from fivefold.job.config import Job
from fivefold.launch.device import TORCH_DTYPES, choose_device
from fivefold.launch.processes import Rank
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.kernels import by_definition
from fivefold.model.layers import TokenPositions
from fivefold.model.linear_cross_entropy import loss_sum
from fivefold.model.ops import LocalAttention, LocalOps
from fivefold.optim.base import group_of
from fivefold.optim.groups import ParamGroup
from fivefold.optim.lr_schedule import learning_rate
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter
from fivefold.support.plugin_calls import ask, instance
from fivefold.verifier.cases import reader
from fivefold.verifier.compare import max_differences, zero_gradients
from fivefold.verifier.plain_moe import Balancing, PlainMoE, replace_moe_layers

NUDGED_RUNS = 3  # runs with other roundings, in addition to the reference itself, that measure its noise


@dataclass(frozen=True)
class ReferenceStep:
    loss: float
    norm: float  # of the gradients, before clipping
    gradients: dict[str, Tensor]  # in full precision, before clipping
    routing: dict[int, Tensor] = field(default_factory=dict)  # by layer, [B, S, K]: each token's experts, best first
    biases: dict[str, Tensor] = field(default_factory=dict)  # of experts, after the step
    mismatched: dict[str, int] = field(default_factory=dict)  # by router: tokens that would have gone elsewhere
    zeros: set[str] = field(default_factory=set)  # gradients that are zero in theory, of this step's data


@dataclass(frozen=True)
class Reference:
    steps: list[ReferenceStep]
    parameters: dict[str, Tensor]  # after the last step, in full precision
    noise: dict[str, float] = field(default_factory=dict)  # the rounding error of each gradient: see `measure_noise`
    mismatched: dict[str, int] = field(default_factory=dict)  # by router, the most in any step: see `measure_noise`

    def save(self, path: Path) -> None:
        rows = [
            (step.loss, step.norm, step.gradients, step.routing, step.biases, step.mismatched, step.zeros)
            for step in self.steps
        ]
        torch.save((rows, self.parameters, self.noise, self.mismatched), path)

    @classmethod
    def load(cls, path: Path) -> "Reference":
        rows, parameters, noise, mismatched = torch.load(path, mmap=True, weights_only=True)
        return cls([ReferenceStep(*row) for row in rows], parameters, noise, mismatched)


def write_reference(rank: Rank, job: Job, path: Path) -> list[Routing]:
    """Write the reference of a job to a file; returns where the tokens of each step went.

    In dtypes narrower than float64 more runs follow, which say how far rounding moves each gradient.
    """
    device = choose_device(job.train.device, rank.number)
    exact = reference = run_reference(job, device)
    if job.train.dtype != "float64":
        exact = run_reference(job, torch.device("cpu"), exact=True, replay=reference)
        measure_noise(reference, exact, reference)
        for seed in range(1, NUDGED_RUNS + 1):
            measure_noise(reference, exact, run_reference(job, device, nudge_seed=seed, replay=reference))
    _find_zero_gradients(reference, exact, job)
    reference.save(path)
    return [{layer: chosen.numpy() for layer, chosen in step.routing.items()} for step in reference.steps]


def write_references(rank: Rank, jobs: list[Job], paths: list[Path]) -> Generator[list[Routing]]:
    """Several in turn, in one process."""
    for job, path in zip(jobs, paths, strict=True):
        yield write_reference(rank, job, path)


def measure_noise(reference: Reference, exact: Reference, run: Reference) -> None:
    """Raise the reference's noise and mismatches to what a run in its dtype has.

    Noise is the distance of a gradient from the `exact` run's in float64; mismatches are tokens whose scores
    would have chosen other experts than the reference's.
    """
    for step, exact_step in zip(run.steps, exact.steps, strict=True):
        for name, distance in max_differences(step.gradients, exact_step.gradients).items():
            reference.noise[name] = max(reference.noise.get(name, 0.0), distance)
        for router, tokens in (*step.mismatched.items(), *exact_step.mismatched.items()):
            reference.mismatched[router] = max(reference.mismatched.get(router, 0), tokens)


def _find_zero_gradients(reference: Reference, exact: Reference, job: Job) -> None:
    """Note which gradients are zero in theory, step by step: where all rows are short, tokens with a target may see
    nothing but themselves, and k has no gradient."""
    for step, exact_step in zip(reference.steps, exact.steps, strict=True):
        step.zeros.update(zero_gradients(exact_step.gradients, job.model))


# ---- one run --------------------------------------------------------------------------------------------------------


def run_reference(
    job: Job, device: torch.device, *, exact: bool = False, nudge_seed: int = 0, replay: Reference | None = None
) -> Reference:
    """Train the job on one device. Of its layout only dp is read: it chooses the data's empty masks.

    `exact` computes in float64, with weights that are rounded as the job's are. With a `nudge_seed` other than 0, every
    weight is moved up or down by one rounding before each step, by random signs. `replay`: tokens go to the experts
    that they went to in that run.
    """
    model = Decoder(job.model, seed=job.train.seed, ops=_ops(job))
    moe_layers = replace_moe_layers(model, job.model, _balancing(job)) if job.model.experts is not None else {}
    weights = MixedPrecision(model, job, device, exact=exact, nudge_seed=nudge_seed)
    optimizer = _stock_optimizer(job, weights.masters)
    steps, read = [], reader(job)
    for number in range(job.train.steps):
        batch = whole.mine if isinstance(whole := read(number), DpShare) else whole
        if replay is not None:
            for layer, moe in moe_layers.items():
                moe.replayed = replay.steps[number].routing[layer]
        loss = _loss_sum(job, model, batch, device) / max(1, batch.loss_tokens)
        model.zero_grad()
        torch.stack([loss, *(moe.losses.to(loss) for moe in moe_layers.values())]).sum().backward()
        weights.move_gradients()
        gradients = {name: m.grad.cpu().clone() for name, m in weights.masters.items() if m.grad is not None}
        norm = nn.utils.clip_grad_norm_(weights.masters.values(), job.optimizer.clip or torch.inf)
        for group in optimizer.param_groups:
            group["lr"] = group["lr_factor"] * learning_rate(job.optimizer, number, job.train.steps)
        if batch.loss_tokens:
            optimizer.step()
            for moe in moe_layers.values():
                moe.end_step()
        weights.round_masters()
        steps.append(ReferenceStep(loss.item(), norm.item(), gradients, **_routing_facts(job.model, moe_layers)))
    return Reference(steps, {name: master.detach().cpu() for name, master in weights.masters.items()})


class MixedPrecision:
    """The weights of a run: full-precision masters for the optimizer, and rounded ones for the model."""

    def __init__(self, model: Decoder, job: Job, device: torch.device, *, exact: bool, nudge_seed: int):
        compute = TORCH_DTYPES[job.train.dtype]
        self.master_dtype = torch.float64 if compute == torch.float64 else torch.float32
        model.to(device, self.master_dtype)
        initialise(model, job.model, job.train.seed)
        if exact:  # after the initial weights have been drawn as the job draws them
            self.master_dtype = torch.float64
            model.to(self.master_dtype)
        self.weights = dict(model.named_parameters())
        self.masters = {name: nn.Parameter(weight.detach().clone()) for name, weight in self.weights.items()}
        unrounded = torch.promote_types(compute, torch.float32)
        self.rounded_to = {p.name: unrounded if p.full_precision else compute for p in job.model.parameters()}
        for name, weight in self.weights.items():
            weight.data = weight.data.to(torch.float64 if exact else self.rounded_to[name])
        self.nudged, self.signs = nudge_seed != 0, torch.Generator().manual_seed(nudge_seed)
        self.round_masters()

    @torch.no_grad()
    def round_masters(self) -> None:
        """Give the model the masters, rounded to the dtype in which the job computes."""
        for name, master in self.masters.items():
            rounded = master.to(self.rounded_to[name])
            self.weights[name].copy_(self._nudge(rounded) if self.nudged else rounded)

    def _nudge(self, weight: Tensor) -> Tensor:
        """Each number moved up or down by one rounding, at random."""
        sign = (2 * torch.randint(0, 2, weight.shape, generator=self.signs) - 1).to(weight.device)
        half = torch.finfo(weight.dtype).eps / 2  # what is added is rounded to the next number
        return (weight.double() * (1 + half * sign)).to(weight.dtype)

    def move_gradients(self) -> None:
        """Give the masters the gradients of the model's weights."""
        for name, master in self.masters.items():
            gradient = self.weights[name].grad
            master.grad = None if gradient is None else gradient.to(self.master_dtype, copy=True)


def _loss_sum(job: Job, model: Decoder, batch: Batch, device: torch.device) -> Tensor:
    """The sum of the losses of a whole batch's tokens."""
    tokens, targets, mask, samples, documents = (
        torch.from_numpy(array).to(device)
        for array in (batch.tokens, batch.targets, batch.loss_mask, batch.samples, batch.documents)
    )
    plain = TokenPositions.of(tokens)
    positions = TokenPositions(plain.position_ids, samples, plain.length, documents if job.data.document_mask else None)
    return loss_sum(model(tokens, positions), targets, mask, job.loss)


def _stock_optimizer(job: Job, masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's optimizer, or one as plain, with the groups of the job's."""
    groups: dict[ParamGroup, list[Parameter]] = defaultdict(list)
    for parameter in job.model.parameters():
        groups[group_of(job.optimizer, parameter)].append(parameter)
    params = [
        group._asdict() | {"params": [masters[parameter.name] for parameter in about], "about": about}
        for group, about in groups.items()
    ]
    stock = instance("a torch.optim.Optimizer", torch.optim.Optimizer)
    return cast(torch.optim.Optimizer, ask(job.optimizer, "stock", params, wanted=stock, foreach=False))


# ---- attention and experts ------------------------------------------------------------------------------------------


class PlainAttention(LocalAttention):
    """Windows and sinks on the full matrix of scores: nothing of the kernels that are being judged."""

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, *, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        return positions.mask(window or positions.length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        return by_definition(q, k, v, mask, sinks)


def _ops(job: Job) -> LocalOps | None:
    """The decoder's operations; None, its own, where its attention is PyTorch's."""
    return LocalOps(attention=PlainAttention()) if job.model.sinks or job.model.windowed else None


def _balancing(job: Job) -> Balancing:
    train = job.train
    return Balancing(balance_loss=train.balance_loss, z_loss=train.router_z_loss, bias_rate=train.balance_rate)


def _routing_facts(spec: ModelSpec, moe_layers: dict[int, PlainMoE]) -> dict[str, Any]:
    """The fields of a `ReferenceStep` that are about experts."""
    biased = {layer: moe for layer, moe in moe_layers.items() if moe.settings.balance_bias}
    return {
        "routing": {layer: moe.chosen.cpu() for layer, moe in moe_layers.items()},
        "biases": {f"{spec.router(layer)}.balance": moe.balance_bias.clone() for layer, moe in biased.items()},
        "mismatched": {spec.router(layer): moe.mismatched for layer, moe in moe_layers.items()},
    }
