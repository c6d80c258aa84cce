"""A mixture of experts as its formulas say: every expert in turn, on the tokens that chose it, under stock autograd.

The reference's decoder has it in place of the one that is being judged. So this file imports nothing of `model/moe.py`
and of what that is made of. Shapes: B rows of S tokens, n = B S, E hidden, X experts, K of them for each token.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.model.layers import ACTIVATIONS, gated
from fivefold.spec.kinds import MLP
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import Problem, UserError
from fivefold.support.plugin_calls import error_text
from fivefold.support.plugins import is_plugin, resolve_class

Linears = dict[str, list[Tensor]]  # of one expert, by name (gate, up, down): its weight and, if it has one, its bias


@dataclass(frozen=True)
class Balancing:
    """What evens the load out: the factors of two losses, and how far the bias of an expert moves in a step."""

    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0


def replace_moe_layers(model: nn.Module, spec: ModelSpec, balancing: Balancing) -> dict[int, "PlainMoE"]:
    """Put a `PlainMoE` into each layer of a decoder that has experts, or what its kind has for it; returns them by
    layer."""
    moe_layers = {}
    for layer in spec.routed_layers:
        kind = spec.kinds(layer).mlp
        assert kind is not None
        moe_layers[layer] = _reference(kind, spec, balancing)
        block: Any = model.get_submodule(f"layers.{layer}")
        setattr(block, kind.place, moe_layers[layer])
        block.routed = False  # it is called with the stream alone
    return moe_layers


def _reference(kind: MLP, spec: ModelSpec, balancing: Balancing) -> "PlainMoE":
    """What a kind's module is held against; of a plugin it is the author's, as the kind is."""
    if not is_plugin(kind.name):
        return cast(PlainMoE, resolve_class(kind.reference)(spec, balancing))
    try:
        made = resolve_class(kind.reference)(spec, balancing)
    except (Exception, SystemExit) as error:
        lack = f"could not be made: {error_text(error, kind.name)}"
        raise UserError(Problem("plugin.protocol", f"{kind.reference} of {kind.name} {lack}")) from error
    if not isinstance(made, PlainMoE):
        lack = f"gave a {type(made).__name__}, and not a {PlainMoE.__module__}:{PlainMoE.__name__}"
        raise UserError(Problem("plugin.protocol", f"{kind.reference} of {kind.name} {lack}"))
    return made


class PlainMoE(nn.Module):
    """Its parameters have the names that they have in the model. It sees the rows of a whole global batch."""

    def __init__(self, spec: ModelSpec, balancing: Balancing):
        super().__init__()
        assert spec.experts is not None
        self.settings, self.balancing, self.activation = spec.experts, balancing, ACTIVATIONS[spec.activation]
        self.router = nn.Linear(spec.hidden, self.settings.count, bias=spec.bias)
        self.experts = _stacked_linears(spec, self.settings.ffn, self.settings.count)
        self.shared = _stacked_linears(spec, self.settings.shared_ffn, 1) if self.settings.shared else None
        self.balance_bias = torch.zeros(self.settings.count, dtype=torch.float64)  # of the choice, not the weights
        self.replayed: Tensor | None = None  # [B, S, K] the experts that another run chose: this one takes them
        # Of the last forward pass:
        self.chosen = torch.empty(0, dtype=torch.int64)  # [B, S, K] the experts of each token, the best first
        self.mismatched = 0  # tokens that would have gone elsewhere by the scores of this run
        self.losses = torch.zeros(())  # what is added to the loss of the tokens

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]"""
        tokens, dtype = x.flatten(0, 1), torch.promote_types(x.dtype, torch.float32)
        logits = self._logits(tokens, dtype)
        scores = logits.softmax(-1) if self.settings.scores == "softmax" else logits.sigmoid()
        chosen = self._choose(scores)
        weights = scores.gather(1, chosen)
        if self.settings.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.settings.scale
        self.chosen = chosen.unflatten(0, x.shape[:2])
        self.losses = self._losses(logits, scores)
        y = self._sum_experts(tokens, chosen, weights).to(x.dtype).view_as(x)
        if self.shared is None:
            return y
        [shared_expert] = _by_expert(self.shared, 1)
        return y + self._network(shared_expert, x)

    def end_step(self) -> None:
        """Move the bias after the load of the batch: up where it is below the mean, down where it is above."""
        if self.settings.balance_bias:
            load = torch.bincount(self.chosen.flatten().cpu(), minlength=self.settings.count).double()
            self.balance_bias += self.balancing.bias_rate * (load.mean() - load).sign()

    # ---- router ------------------------------------------------------------------------------------------------------

    def _logits(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, E] -> [n, X]"""
        bias = None if self.router.bias is None else self.router.bias.to(dtype)
        return F.linear(tokens.to(dtype), self.router.weight.to(dtype), bias)

    def _choose(self, scores: Tensor) -> Tensor:
        """[n, X] -> [n, K] the experts of each token: the best by these scores, or the choice of another run."""
        best = self._top_k_experts(scores)
        chosen = best if self.replayed is None else self.replayed.flatten(0, 1).to(scores.device)
        self.mismatched = int((best.sort(-1).values != chosen.sort(-1).values).any(-1).sum())
        return chosen

    @torch.no_grad()
    def _top_k_experts(self, scores: Tensor) -> Tensor:
        """[n, X] -> [n, K], the best first, the first of equals; experts of the best groups only."""
        if self.settings.balance_bias:
            scores = scores + self.balance_bias.to(scores)
        if self.settings.groups > 1:
            groups = scores.unflatten(1, (self.settings.groups, -1))
            # DeepSeek-V2 compares groups by their best score, V3 by the sum of the best two.
            counted = 1 if self.settings.scores == "softmax" else min(2, groups.shape[-1])
            group_scores = groups.gather(2, _top_k(groups, counted)).sum(-1)
            top_groups = _top_k(group_scores, self.settings.top_groups)
            allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, top_groups, True)
            scores = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        return _top_k(scores, self.settings.top_k)

    def _losses(self, logits: Tensor, scores: Tensor) -> Tensor:
        """The balance loss of DeepSeek-V3, row by row (arXiv 2412.19437, equations 17 to 20), as the mean over rows;
        and the z loss of ST-MoE (2202.08906, equation 5), the mean over tokens."""
        rows, length, top_k = self.chosen.shape
        experts = self.settings.count
        total = logits.new_zeros(())
        if self.balancing.balance_loss:
            normed = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (rows, length))
            for row in range(rows):
                counts = torch.bincount(self.chosen[row].flatten(), minlength=experts).to(scores)
                shares = experts / (top_k * length) * counts
                total = total + self.balancing.balance_loss * (shares * normed[row].mean(0)).sum() / rows
        if self.balancing.z_loss:
            total = total + self.balancing.z_loss * logits.logsumexp(-1).square().mean()
        return total

    # ---- experts -----------------------------------------------------------------------------------------------------

    def _sum_experts(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[n, E], [n, K], [n, K] -> [n, E] the sum over each token's experts of their outputs times their weights."""
        rows, outputs = [], []
        for expert, linears in enumerate(_by_expert(self.experts, self.settings.count)):
            row, k = (chosen == expert).nonzero(as_tuple=True)  # the tokens that chose it, as their k-th
            rows.append(row)
            outputs.append(self._network(linears, tokens[row]).to(weights.dtype) * weights[row, k, None])
        return torch.zeros_like(tokens, dtype=weights.dtype).index_add(0, torch.cat(rows), torch.cat(outputs))

    def _network(self, linears: Linears, x: Tensor) -> Tensor:
        """The feed-forward network of one expert."""
        ups = [F.linear(x, *linears[name]) for name in ("gate", "up") if name in linears]
        return F.linear(self.activation(*ups), *linears["down"])


def _stacked_linears(spec: ModelSpec, ffn: int, count: int) -> nn.ModuleDict:
    """The linears of `count` networks of inner width `ffn`: their weights lie one below the other in one matrix."""
    names = ("gate", "up") if gated(spec.activation) else ("up",)
    ups = {name: nn.Linear(spec.hidden, count * ffn, bias=spec.bias) for name in names}
    return nn.ModuleDict(ups | {"down": nn.Linear(ffn, count * spec.hidden, bias=spec.bias)})


def _by_expert(stacked: nn.ModuleDict, count: int) -> list[Linears]:
    """The rows of stacked linears that belong to each of `count` experts."""
    parts = {name: [p.chunk(count) for p in linear.parameters()] for name, linear in stacked.items()}
    return [{name: [part[expert] for part in both] for name, both in parts.items()} for expert in range(count)]


def _top_k(x: Tensor, k: int) -> Tensor:
    """The indices of the k largest along the last dimension; of equals the first ones, which torch.topk leaves open."""
    left, indices = x.clone(), []
    for _ in range(k):
        indices.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, indices[-1], -torch.inf)
    return torch.cat(indices, -1)
