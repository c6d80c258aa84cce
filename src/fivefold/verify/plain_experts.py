"""A mixture of experts as its formulas say: every expert in turn, on the tokens that chose it, under stock autograd.

The reference's decoder has it in place of the one that is being judged: this file imports nothing of `model/experts`.
Shapes: B rows of S tokens, n = B S, E hidden, X experts, K of them for each token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.model.activations import ACTIVATIONS, gated
from fivefold.spec.model import ModelSpec


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
        self.strays = 0  # tokens of that pass for which its scores would have chosen others
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
        self.strays = int((own.sort(-1).values != chosen.sort(-1).values).any(-1).sum())
        weights = scores.gather(1, chosen)
        if self.of.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.of.scale
        self.chosen = chosen.unflatten(0, x.shape[:2])
        self.losses = self._losses(logits, scores)
        where, said = [], []
        for expert, linears in enumerate(self._linears(self.experts, self.of.count)):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            where.append(token)
            said.append(self._network(linears, tokens[token]).to(kind) * weights[token, slot, None])
        y = torch.zeros_like(tokens, dtype=kind).index_add(0, torch.cat(where), torch.cat(said))
        y = y.to(x.dtype).view_as(x)
        if self.shared is None:
            return y
        [linears] = self._linears(self.shared, 1)
        return y + self._network(linears, x)

    def _linears(self, layers: nn.ModuleDict, count: int) -> list[dict[str, list[Tensor]]]:
        """The weight of each linear of each expert, and its bias: equal parts of the rows."""
        parts = {name: [one.chunk(count) for one in layer.parameters()] for name, layer in layers.items()}
        return [{name: [one[expert] for one in both] for name, both in parts.items()} for expert in range(count)]

    def _network(self, linears: dict[str, list[Tensor]], x: Tensor) -> Tensor:
        ups = [F.linear(x, *linears[name]) for name in ("gate", "up") if name in linears]
        return F.linear(ACTIVATIONS[self.spec.activation](*ups), *linears["down"])

    @torch.no_grad()
    def _choose(self, scores: Tensor) -> Tensor:
        """The K best, the best first, the first of equals; experts of the best groups only."""
        wish = scores + self.balance.to(scores) if self.of.balance_bias else scores
        if self.of.groups > 1:
            groups = wish.unflatten(1, (self.of.groups, -1))
            counted = 1 if self.of.scores == "softmax" else min(2, groups.shape[-1])
            heads = groups.gather(2, _largest(groups, counted)).sum(-1)
            open_ = torch.zeros_like(heads, dtype=torch.bool).scatter(1, _largest(heads, self.of.top_groups), True)
            wish = groups.masked_fill(~open_[..., None], -torch.inf).flatten(1)
        return _largest(wish, self.of.top_k)

    def _losses(self, logits: Tensor, scores: Tensor) -> Tensor:
        """DeepSeek-V3's for each row (arXiv 2412.19437, equations 17 to 20), the mean over rows; ST-MoE's (2202.08906,
        equation 5), the mean over tokens."""
        rows, length, slots = self.chosen.shape
        total = logits.new_zeros(())
        if self.factors.balance_loss:
            normed = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (rows, length))
            for row in range(rows):
                got = torch.bincount(self.chosen[row].flatten(), minlength=self.of.count).to(scores)
                shares = self.of.count / (slots * length) * got
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
    left, found = x.clone(), []
    for _ in range(count):
        found.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


def take_over(model: nn.Module, spec: ModelSpec, factors: Factors) -> dict[int, PlainMixture]:
    """Give the layers of a decoder that have experts this mixture; by their numbers."""
    found = {}
    for layer in range(spec.dense_layers, spec.layers):
        found[layer] = PlainMixture(spec, factors)
        model.get_submodule(f"layers.{layer}").mlp = found[layer]
    return found
