"""What one device computes: the plain decoder, stock autograd, torch's own optimizer, the whole global batch at once.

This file imports nothing from `parallel/`, nor the engine and the optimizer that are being judged. The decoder's
experts are `PlainMixture`. Where they send tokens is written down; runs that measure rounding send them there, too.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.data.batch import Batch, DpShare
from fivefold.job.config import Job
from fivefold.launch.device import DTYPES, choose_device
from fivefold.launch.processes import Rank
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.kernels import by_definition
from fivefold.model.layers import ACTIVATIONS, TokenPositions, gated
from fivefold.model.linear_cross_entropy import loss_sum
from fivefold.model.ops import LocalAttention, LocalOps
from fivefold.optim.base import learning_rate
from fivefold.spec.model import ModelSpec
from fivefold.verifier.cases import reader
from fivefold.verifier.compare import max_differences, router_name, zero_gradients

# ---- plain experts --------------------------------------------------------------------------------------------------
# A mixture of experts as its formulas say: every expert in turn, on the tokens that chose it, under stock autograd.
#
# The reference's decoder has it in place of the one that is being judged: this file imports nothing of
# `model/moe.py`. Shapes: B rows of S tokens, n = B S, E hidden, X experts, K of them for each token.


@dataclass(frozen=True)
class Factors:
    """Of the losses that even the load out, and of the step of the bias that does."""

    balance_loss: float = 0.0
    z_loss: float = 0.0
    rate: float = 0.0


class PlainMixture(nn.Module):
    """Names of parameters are those of the model. The rows are those of a whole global batch."""

    def __init__(self, spec: ModelSpec, factors: Factors):
        super().__init__()
        assert spec.experts is not None
        self.spec, self.of, self.factors = spec, spec.experts, factors
        self.router = nn.Linear(spec.hidden, self.of.count, bias=spec.bias)
        self.experts = _networks(spec, self.of.ffn, self.of.count)
        self.shared = _networks(spec, self.of.shared_ffn, 1) if self.of.shared else None
        self.balance = torch.zeros(self.of.count, dtype=torch.float64)  # helps to choose, and does not weigh
        self.replayed: Tensor | None = None  # [B, S, K] what another run chose
        self.chosen = torch.empty(0, dtype=torch.int64)  # [B, S, K] by the last forward pass
        self.mismatched = 0  # tokens of that pass for which its scores would have chosen others
        self.losses = torch.zeros(())  # what its losses add to the one of the tokens

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]"""
        tokens, kind = x.flatten(0, 1), torch.promote_types(x.dtype, torch.float32)
        bias = None if self.router.bias is None else self.router.bias.to(kind)
        logits = F.linear(tokens.to(kind), self.router.weight.to(kind), bias)
        scores = logits.softmax(-1) if self.of.scores == "softmax" else logits.sigmoid()
        own = chosen = self._choose(scores)
        if self.replayed is not None:
            chosen = self.replayed.flatten(0, 1).to(x.device)
        self.mismatched = int((own.sort(-1).values != chosen.sort(-1).values).any(-1).sum())
        weights = scores.gather(1, chosen)
        if self.of.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.of.scale
        self.chosen = chosen.unflatten(0, x.shape[:2])
        self.losses = self._losses(logits, scores)
        rows, outputs = [], []
        for expert, linears in enumerate(self._linears(self.experts, self.of.count)):
            token, choice = (chosen == expert).nonzero(as_tuple=True)
            rows.append(token)
            outputs.append(self._network(linears, tokens[token]).to(kind) * weights[token, choice, None])
        y = torch.zeros_like(tokens, dtype=kind).index_add(0, torch.cat(rows), torch.cat(outputs))
        y = y.to(x.dtype).view_as(x)
        if self.shared is None:
            return y
        [linears] = self._linears(self.shared, 1)
        return y + self._network(linears, x)

    def _linears(self, layers: nn.ModuleDict, count: int) -> list[dict[str, list[Tensor]]]:
        """The weight of each linear of each expert, and its bias: equal parts of the rows."""
        parts = {name: [p.chunk(count) for p in layer.parameters()] for name, layer in layers.items()}
        return [{name: [part[expert] for part in both] for name, both in parts.items()} for expert in range(count)]

    def _network(self, linears: dict[str, list[Tensor]], x: Tensor) -> Tensor:
        ups = [F.linear(x, *linears[name]) for name in ("gate", "up") if name in linears]
        return F.linear(ACTIVATIONS[self.spec.activation](*ups), *linears["down"])

    @torch.no_grad()
    def _choose(self, scores: Tensor) -> Tensor:
        """The K best, the best first, the first of equals; experts of the best groups only."""
        if self.of.balance_bias:
            scores = scores + self.balance.to(scores)
        if self.of.groups > 1:
            groups = scores.unflatten(1, (self.of.groups, -1))
            counted = 1 if self.of.scores == "softmax" else min(2, groups.shape[-1])
            group_scores = groups.gather(2, _largest(groups, counted)).sum(-1)
            top_groups = _largest(group_scores, self.of.top_groups)
            allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, top_groups, True)
            scores = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        return _largest(scores, self.of.top_k)

    def _losses(self, logits: Tensor, scores: Tensor) -> Tensor:
        """DeepSeek-V3's for each row (arXiv 2412.19437, equations 17 to 20), the mean over rows; ST-MoE's (2202.08906,
        equation 5), the mean over tokens."""
        rows, length, top_k = self.chosen.shape
        total = logits.new_zeros(())
        if self.factors.balance_loss:
            normed = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (rows, length))
            for row in range(rows):
                counts = torch.bincount(self.chosen[row].flatten(), minlength=self.of.count).to(scores)
                shares = self.of.count / (top_k * length) * counts
                total = total + self.factors.balance_loss * (shares * normed[row].mean(0)).sum() / rows
        if self.factors.z_loss:
            total = total + self.factors.z_loss * logits.logsumexp(-1).square().mean()
        return total

    def end_step(self) -> None:
        """The bias follows the load of the batch: up where it is below the mean, down where it is above."""
        if self.of.balance_bias:
            load = torch.bincount(self.chosen.flatten().cpu(), minlength=self.of.count).double()
            self.balance += self.factors.rate * (load.mean() - load).sign()


def _networks(spec: ModelSpec, inner: int, count: int) -> nn.ModuleDict:
    """The linears of `count` experts, one below the other."""
    names = ("gate", "up") if gated(spec.activation) else ("up",)
    ups = {name: nn.Linear(spec.hidden, count * inner, bias=spec.bias) for name in names}
    return nn.ModuleDict(ups | {"down": nn.Linear(inner, count * spec.hidden, bias=spec.bias)})


def _largest(x: Tensor, count: int) -> Tensor:
    """The places of the `count` largest along the last dimension; of equals the first ones."""
    left, places = x.clone(), []
    for _ in range(count):
        places.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, places[-1], -torch.inf)
    return torch.cat(places, -1)


def replace_mixtures(model: nn.Module, spec: ModelSpec, factors: Factors) -> dict[int, PlainMixture]:
    """Give the layers of a decoder that have experts this mixture; by their numbers."""
    mixtures = {}
    for layer in spec.routed_layers:
        mixtures[layer] = PlainMixture(spec, factors)
        model.get_submodule(f"layers.{layer}").mlp = mixtures[layer]
    return mixtures


# ---- reference ------------------------------------------------------------------------------------------------------


DRAWS = 3  # runs with other roundings, in addition to the reference itself, that measure its noise


class ByDefinition(LocalAttention):
    """Windows and sinks on the full matrix of scores: nothing of the kernels that are being judged."""

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        return positions.mask(window or positions.length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        return by_definition(q, k, v, mask, sinks)


@dataclass(frozen=True)
class ReferenceStep:
    loss: float
    norm: float
    gradients: dict[str, Tensor]  # in full precision, before clipping
    routing: dict[int, Tensor] = field(default_factory=dict)  # by layer, [B, S, K]: each token's experts, best first
    biases: dict[str, Tensor] = field(default_factory=dict)  # of experts, after the step
    mismatched: dict[str, int] = field(default_factory=dict)  # by router: tokens that would have gone elsewhere
    zeros: set[str] = field(default_factory=set)  # gradients that are zero in theory, of this step's data


@dataclass(frozen=True)
class Reference:
    steps: list[ReferenceStep]
    parameters: dict[str, Tensor]  # after the last step, in full precision
    noise: dict[str, float] = field(default_factory=dict)  # the rounding error of each gradient: see `compare`
    mismatched: dict[str, int] = field(default_factory=dict)  # by router, at most: see `add_noise`

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
        step.zeros.update(zero_gradients(true.gradients, job.model))


def add_noise(reference: Reference, exact: Reference, drawn: Reference) -> None:
    """Note how far another run in the dtype of the proof is from the true gradients, and how many tokens mismatch."""
    for step, true in zip(drawn.steps, exact.steps, strict=True):
        for name, distance in max_differences(step.gradients, true.gradients).items():
            reference.noise[name] = max(reference.noise.get(name, 0.0), distance)
        for router, tokens in (*step.mismatched.items(), *true.mismatched.items()):
            reference.mismatched[router] = max(reference.mismatched.get(router, 0), tokens)


def run_reference(
    job: Job, device: torch.device, *, exact: bool = False, nudge: int = 0, like: Reference | None = None
) -> Reference:
    """Train the job on one device. Of its layout only dp is read: it chooses the data's empty masks.

    `exact` computes in float64, with weights that are rounded as the job's are. `nudge`, where it is not 0, is the seed
    of random signs: every weight is moved up or down by one rounding before each step. `like`: tokens go to the experts
    that they went to in that run.
    """
    compute = DTYPES[job.train.dtype]
    accum = torch.float64 if compute == torch.float64 else torch.float32
    ops = LocalOps(attention=ByDefinition()) if job.model.sinks or job.model.windowed else None
    model = Decoder(job.model, seed=job.train.seed, ops=ops)
    mixtures = replace_mixtures(model, job.model, factors_of(job)) if job.model.experts is not None else {}
    model.to(device, accum)
    initialise(model, job.model, job.train.seed)
    if exact:
        model.double()
        accum = torch.float64
    weights = dict(model.named_parameters())
    masters = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    unrounded = torch.promote_types(compute, torch.float32)
    dtypes = {param.name: unrounded if param.full_precision else compute for param in job.model.parameters()}
    for name, weight in weights.items():
        weight.data = weight.data.to(torch.float64 if exact else dtypes[name])
    signs = torch.Generator().manual_seed(nudge)

    @torch.no_grad()
    def sync_params() -> None:
        for name, master in masters.items():
            weight = master.to(dtypes[name])
            if nudge:
                sign = (2 * torch.randint(0, 2, weight.shape, generator=signs) - 1).to(device)
                half = torch.finfo(weight.dtype).eps / 2  # what is added is rounded to the next number
                weight = (weight.double() * (1 + half * sign)).to(weight.dtype)
            weights[name].copy_(weight)

    sync_params()
    optimizer = _stock_optimizer(job, masters)
    steps, read = [], reader(job)
    for number in range(job.train.steps):
        batch = whole.mine if isinstance(whole := read(number), DpShare) else whole
        for layer, mixture in mixtures.items():
            mixture.replayed = like.steps[number].routing[layer] if like is not None else None
        loss = _loss(job, model, batch, device) / max(1, batch.loss_tokens)
        model.zero_grad()
        torch.stack([loss, *(mixture.losses.to(loss) for mixture in mixtures.values())]).sum().backward()
        for name, master in masters.items():
            gradient = weights[name].grad
            master.grad = None if gradient is None else gradient.to(accum, copy=True)
        before = {name: m.grad.cpu().clone() for name, m in masters.items() if m.grad is not None}
        norm = nn.utils.clip_grad_norm_(masters.values(), job.optimizer.clip or torch.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job.optimizer, number, job.train.steps)
        if batch.loss_tokens:
            optimizer.step()
            for mixture in mixtures.values():
                mixture.end_step()
        sync_params()
        steps.append(ReferenceStep(loss.item(), norm.item(), before, *_routed(mixtures)))
    return Reference(steps, {name: master.detach().cpu() for name, master in masters.items()})


def factors_of(job: Job) -> Factors:
    train = job.train
    return Factors(train.balance_loss, train.router_z_loss, train.balance_rate)


def _routed(mixtures: dict[int, PlainMixture]) -> tuple[dict[int, Tensor], dict[str, Tensor], dict[str, int]]:
    """Where a step's tokens went, the biases that came of it, and how many would have gone elsewhere."""
    biased = {layer: mixture for layer, mixture in mixtures.items() if mixture.of.balance_bias}
    biases = {f"{router_name(layer)}.balance": mixture.balance.clone() for layer, mixture in biased.items()}
    mismatched = {router_name(layer): mixture.mismatched for layer, mixture in mixtures.items()}
    return {layer: mixture.chosen.cpu() for layer, mixture in mixtures.items()}, biases, mismatched


def _stock_optimizer(job: Job, masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's optimizer, or one as plain; only linears decay."""
    groups = []
    for linear, decay in ((True, job.optimizer.weight_decay), (False, 0.0)):
        about = [parameter for parameter in job.model.parameters() if (parameter.kind == "linear") == linear]
        params = [masters[parameter.name] for parameter in about]
        groups.append({"params": params, "weight_decay": decay, "about": about})
    return job.optimizer.stock(groups, foreach=False)


def _loss(job: Job, model: Decoder, batch: Batch, device: torch.device) -> Tensor:
    """The loss sum of a whole batch."""
    tokens, targets, mask, samples, documents = (
        torch.from_numpy(array).to(device)
        for array in (batch.tokens, batch.targets, batch.loss_mask, batch.samples, batch.documents)
    )
    plain = TokenPositions.of(tokens)
    positions = TokenPositions(plain.position_ids, samples, plain.length, documents if job.data.document_mask else None)
    return loss_sum(model(tokens, positions), targets, mask, job.loss)
