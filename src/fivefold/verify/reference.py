"""What one device computes: the plain decoder, stock autograd, torch's own optimizer, the whole global batch at once.

This file imports nothing from `parallel/`, nor the engine and the optimizer that are being judged. The decoder's
experts are `plain_experts`. Where they send tokens is written down; runs that measure rounding send them there, too.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fivefold.data.batch import Batch
from fivefold.job.config import Job
from fivefold.job.learning_rate import learning_rate
from fivefold.launch.device import DTYPES, choose_device
from fivefold.launch.ranks import Rank
from fivefold.model.attention import by_definition
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.loss import loss_sum
from fivefold.model.ops import LocalAttention, LocalOps
from fivefold.model.positions import TokenPositions
from fivefold.verify.batches import make_batch
from fivefold.verify.compare import distances, router_name, zeros
from fivefold.verify.plain_experts import Factors, PlainMixture, take_over

DRAWS = 3  # runs with other roundings, beside the reference itself, that measure its noise


class ByDefinition(LocalAttention):
    """Windows and sinks on scores that are held whole: nothing of the kernels that are being judged."""

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        return positions.mask(window or positions.length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        return by_definition(q, k, v, mask, sinks)


@dataclass(frozen=True)
class Step:
    loss: float
    norm: float
    gradients: dict[str, Tensor]  # in full precision, before clipping
    routing: dict[int, Tensor] = field(default_factory=dict)  # by layer, [B, S, K]: each token's experts, best first
    biases: dict[str, Tensor] = field(default_factory=dict)  # of experts, after the step
    strays: dict[str, int] = field(default_factory=dict)  # by router: tokens that would have gone elsewhere
    zeros: set[str] = field(default_factory=set)  # gradients that are zero in theory, of this step's data


@dataclass(frozen=True)
class Reference:
    steps: list[Step]
    parameters: dict[str, Tensor]  # after the last step, in full precision
    noise: dict[str, float] = field(default_factory=dict)  # the rounding error of each gradient: see `compare`
    strays: dict[str, int] = field(default_factory=dict)  # the most that rounding has made a router choose otherwise

    def save(self, path: Path) -> None:
        rows = [
            (one.loss, one.norm, one.gradients, one.routing, one.biases, one.strays, one.zeros) for one in self.steps
        ]
        torch.save((rows, self.parameters, self.noise, self.strays), path)

    @classmethod
    def load(cls, path: Path) -> "Reference":
        rows, parameters, noise, strays = torch.load(path, mmap=True, weights_only=True)
        return cls([Step(*row) for row in rows], parameters, noise, strays)


Routing = list[dict[int, NDArray[np.int64]]]  # of each step, by layer


def write_reference(rank: Rank, job: Job, path: Path) -> Routing:
    """Write it, and say where tokens went."""
    device = choose_device(job.train.device, rank.number)
    reference = run_reference(job, device)
    if job.train.dtype == "float64":
        _find_zeros(reference, reference, job)
    else:
        exact = run_reference(job, torch.device("cpu"), exact=True, like=reference)
        _find_zeros(reference, exact, job)
        add_noise(reference, exact, reference)
        for draw in range(1, DRAWS + 1):
            add_noise(reference, exact, run_reference(job, device, nudge=draw, like=reference))
    reference.save(path)
    return [{layer: chosen.numpy() for layer, chosen in step.routing.items()} for step in reference.steps]


def write_each(rank: Rank, jobs: list[Job], paths: list[Path]) -> Generator[Routing]:
    """Several in turn, in one process."""
    for job, path in zip(jobs, paths, strict=True):
        yield write_reference(rank, job, path)


def _find_zeros(reference: Reference, exact: Reference, job: Job) -> None:
    """In every step: in a short one, tokens with a target may see nothing but themselves, and k has no gradient."""
    for step, true in zip(reference.steps, exact.steps, strict=True):
        step.zeros.update(zeros(true.gradients, job.model))


def add_noise(reference: Reference, exact: Reference, drawn: Reference) -> None:
    """Note how far another run in the dtype of the proof is from the true gradients, and how many tokens stray."""
    for found, true in zip(drawn.steps, exact.steps, strict=True):
        for name, distance in distances(found.gradients, true.gradients).items():
            reference.noise[name] = max(reference.noise.get(name, 0.0), distance)
        for router, tokens in (*found.strays.items(), *true.strays.items()):
            reference.strays[router] = max(reference.strays.get(router, 0), tokens)


def run_reference(
    job: Job, device: torch.device, exact: bool = False, nudge: int = 0, like: Reference | None = None
) -> Reference:
    """Train the job on one device. Of its layout only dp is read: it chooses the data's empty masks.

    `exact` computes in float64, with weights that are rounded as the job's are. `nudge`, where it is not 0, is the seed
    of random signs: every weight is moved up or down by one rounding before each step. `like`: tokens go to the experts
    that they went to in that run.
    """
    rounded = DTYPES[job.train.dtype]
    full = torch.float64 if rounded == torch.float64 else torch.float32
    plain = LocalOps(attention=ByDefinition()) if job.model.sinks or job.model.window else None
    model = Decoder(job.model, seed=job.train.seed, ops=plain)
    mixtures = take_over(model, job.model, factors_of(job)) if job.model.experts is not None else {}
    model.to(device, full)
    initialise(model, job.model, job.train.seed)
    if exact:
        model.double()
        full = torch.float64
    weights = dict(model.named_parameters())
    masters = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    single = torch.promote_types(rounded, torch.float32)
    dtypes = {one.name: single if one.exact else rounded for one in job.model.parameters()}
    for name, weight in weights.items():
        weight.data = weight.data.to(torch.float64 if exact else dtypes[name])
    signs = torch.Generator().manual_seed(nudge)

    @torch.no_grad()
    def publish() -> None:
        for name, master in masters.items():
            weight = master.to(dtypes[name])
            if nudge:
                sign = (2 * torch.randint(0, 2, weight.shape, generator=signs) - 1).to(device)
                half = torch.finfo(weight.dtype).eps / 2  # what is added is rounded to the next number
                weight = (weight.double() * (1 + half * sign)).to(weight.dtype)
            weights[name].copy_(weight)

    publish()
    optimizer = _stock(job, masters)
    steps = []
    for number in range(job.train.steps):
        batch = make_batch(job, number)
        for layer, mixture in mixtures.items():
            mixture.replayed = like.steps[number].routing[layer] if like is not None else None
        loss = _loss(job, model, batch, device) / max(1, batch.loss_tokens)
        model.zero_grad()
        torch.stack([loss, *(mixture.losses.to(loss) for mixture in mixtures.values())]).sum().backward()
        for name, master in masters.items():
            gradient = weights[name].grad
            master.grad = None if gradient is None else gradient.to(full, copy=True)
        before = {name: m.grad.cpu().clone() for name, m in masters.items() if m.grad is not None}
        norm = nn.utils.clip_grad_norm_(masters.values(), job.optimizer.clip or torch.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job.optimizer, number, job.train.steps)
        if batch.loss_tokens:
            optimizer.step()
            for mixture in mixtures.values():
                mixture.end_step()
        publish()
        steps.append(Step(loss.item(), norm.item(), before, *_routed(mixtures)))
    return Reference(steps, {name: master.detach().cpu() for name, master in masters.items()})


def factors_of(job: Job) -> Factors:
    train = job.train
    return Factors(train.balance_loss, train.router_z_loss, train.balance_rate)


def _routed(mixtures: dict[int, PlainMixture]) -> tuple[dict[int, Tensor], dict[str, Tensor], dict[str, int]]:
    """Where a step's tokens went, the biases that came of it, and how many would have gone elsewhere."""
    biased = {layer: mixture for layer, mixture in mixtures.items() if mixture.of.balance_bias}
    biases = {f"{router_name(layer)}.balance": mixture.balance.clone() for layer, mixture in biased.items()}
    strays = {router_name(layer): mixture.strays for layer, mixture in mixtures.items()}
    return {layer: mixture.chosen.cpu() for layer, mixture in mixtures.items()}, biases, strays


def _stock(job: Job, masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's optimizer; only linears decay."""
    decayed = {parameter.name for parameter in job.model.parameters() if parameter.kind == "linear"}
    groups = [
        {"params": [p for name, p in masters.items() if (name in decayed) == linear], "weight_decay": decay}
        for linear, decay in ((True, job.optimizer.weight_decay), (False, 0.0))
    ]
    return job.optimizer.stock(groups, foreach=False)


def _loss(job: Job, model: Decoder, batch: Batch, device: torch.device) -> Tensor:
    """The loss sum of a whole batch."""
    tokens, targets, mask, samples, documents = (
        torch.from_numpy(array).to(device)
        for array in (batch.tokens, batch.targets, batch.loss_mask, batch.samples, batch.documents)
    )
    whole = TokenPositions.of(tokens)
    positions = TokenPositions(whole.position_ids, samples, whole.length, documents if job.data.document_mask else None)
    return loss_sum(model(tokens, positions), targets, mask, job.train.label_smoothing, job.train.z_loss)
