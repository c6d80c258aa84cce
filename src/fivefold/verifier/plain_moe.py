"""A mixture of experts as its formulas say: every expert in turn, on the tokens that chose it, under stock autograd.

The reference's decoder has it in place of `model/moe.py`, which is what is verified: so this file imports neither that
module nor the router, dispatch and grouped matmuls that it uses.

Shapes: a batch has B rows of S tokens, n = B S; E is the hidden size, X counts the experts, of which a token takes K.
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

Linears = dict[str, list[Tensor]]  # the linears of one expert: {"gate", "up" or "down": [weight] or [weight, bias]}


@dataclass(frozen=True)
class Balancing:
    """What evens the load of the experts out."""

    balance_loss: float = 0.0  # the factor of the loss
    z_loss: float = 0.0  # the factor of the loss
    bias_rate: float = 0.0  # how far an expert's balance bias moves in a step


def replace_moe_layers(model: nn.Module, spec: ModelSpec, balancing: Balancing) -> dict[int, "PlainMoE"]:
    """Replaces the MoE module of each layer that has experts by the reference module of its kind, `PlainMoE` or a
    plugin's own; returns {layer: reference module}."""
    moe_layers = {}
    for layer in spec.routed_layers:
        kind = spec.kinds(layer).mlp
        assert kind is not None
        moe_layers[layer] = _make_reference(kind, spec, balancing)
        block: Any = model.get_submodule(f"layers.{layer}")
        setattr(block, kind.place, moe_layers[layer])
        block.routed = False  # so the block calls it with the residual stream only
    return moe_layers


def _make_reference(kind: MLP, spec: ModelSpec, balancing: Balancing) -> "PlainMoE":
    """The reference module of a kind. That of a plugin's kind is the plugin's: it may fail, or not be a PlainMoE."""
    if not is_plugin(kind.name):
        return cast(PlainMoE, resolve_class(kind.reference)(spec, balancing))
    try:
        module = resolve_class(kind.reference)(spec, balancing)
    except (Exception, SystemExit) as error:
        reason = f"could not be made: {error_text(error, kind.name)}"
        raise UserError(Problem("plugin.protocol", f"{kind.reference} of {kind.name} {reason}")) from error
    if not isinstance(module, PlainMoE):
        reason = f"gave a {type(module).__name__}, and not a {PlainMoE.__module__}:{PlainMoE.__name__}"
        raise UserError(Problem("plugin.protocol", f"{kind.reference} of {kind.name} {reason}"))
    return module


class PlainMoE(nn.Module):
    """The MoE module of the reference. Its parameters have their names in the model; it sees a whole global batch.

    `replayed` may hold the experts that another run chose. Where scores differ by no more than rounding, two runs could
    otherwise send a token to different experts, and could not be compared.
    """

    def __init__(self, spec: ModelSpec, balancing: Balancing):
        super().__init__()
        assert spec.experts is not None
        self.settings, self.balancing, self.activation = spec.experts, balancing, ACTIVATIONS[spec.activation]
        self.router = nn.Linear(spec.hidden, self.settings.count, bias=spec.bias)
        self.experts = _stacked_linears(spec, self.settings.ffn, self.settings.count)
        self.shared = _stacked_linears(spec, self.settings.shared_ffn, 1) if self.settings.shared else None
        self.balance_bias = torch.zeros(self.settings.count, dtype=torch.float64)  # added to scores to choose by
        self.replayed: Tensor | None = None  # [B, S, K] the experts that another run chose
        # These are set by each forward pass.
        self.chosen = torch.empty(0, dtype=torch.int64)  # [B, S, K] the experts of each token, the best first
        self.mismatched = 0  # tokens whose replayed experts are not those of the best scores here
        self.losses = torch.zeros(())  # the balance and z losses, which are added to the loss of the tokens

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
        [shared_expert] = _split_by_expert(self.shared, 1)
        return y + self._run_expert(shared_expert, x)

    def end_step(self) -> None:
        """Moves the balance bias of each expert by the load of the batch: up if it is below the mean, else down."""
        if self.settings.balance_bias:
            load = torch.bincount(self.chosen.flatten().cpu(), minlength=self.settings.count).double()
            self.balance_bias += self.balancing.bias_rate * (load.mean() - load).sign()

    # ---- router ------------------------------------------------------------------------------------------------------

    def _logits(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, E] -> [n, X]"""
        bias = None if self.router.bias is None else self.router.bias.to(dtype)
        return F.linear(tokens.to(dtype), self.router.weight.to(dtype), bias)

    def _choose(self, scores: Tensor) -> Tensor:
        """[n, X] -> [n, K] the experts of each token: those with the best scores, or the replayed ones."""
        best = self._best_experts(scores)
        chosen = best if self.replayed is None else self.replayed.flatten(0, 1).to(scores.device)
        self.mismatched = int((best.sort(-1).values != chosen.sort(-1).values).any(-1).sum())
        return chosen

    @torch.no_grad()
    def _best_experts(self, scores: Tensor) -> Tensor:
        """[n, X] -> [n, K], the best first; if experts are in groups, only those of the token's best groups."""
        if self.settings.balance_bias:
            scores = scores + self.balance_bias.to(scores)
        if self.settings.groups > 1:
            groups = scores.unflatten(1, (self.settings.groups, -1))
            # DeepSeek-V2 compares groups by their best score, V3 by the sum of the best two.
            summed = 1 if self.settings.scores == "softmax" else min(2, groups.shape[-1])
            group_scores = groups.gather(2, _top_k(groups, summed)).sum(-1)
            top_groups = _top_k(group_scores, self.settings.top_groups)
            allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, top_groups, value=True)
            scores = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        return _top_k(scores, self.settings.top_k)

    def _losses(self, logits: Tensor, scores: Tensor) -> Tensor:
        """The balance loss of DeepSeek-V3, row by row (arXiv 2412.19437, equations 17 to 20), as the mean over rows;
        and the z loss of ST-MoE (2202.08906, equation 5), the mean over tokens."""
        rows, length, top_k = self.chosen.shape
        experts = self.settings.count
        total = logits.new_zeros(())
        if self.balancing.balance_loss:
            probabilities = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (rows, length))  # [B, S, X]
            for row in range(rows):
                counts = torch.bincount(self.chosen[row].flatten(), minlength=experts).to(scores)
                load = experts / (top_k * length) * counts  # 1 where it is even
                total = total + self.balancing.balance_loss * (load * probabilities[row].mean(0)).sum() / rows
        if self.balancing.z_loss:
            total = total + self.balancing.z_loss * logits.logsumexp(-1).square().mean()
        return total

    # ---- experts -----------------------------------------------------------------------------------------------------

    def _sum_experts(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[n, E], [n, K], [n, K] -> [n, E] the sum over each token's experts of their outputs times their weights."""
        indices, outputs = [], []
        for expert, linears in enumerate(_split_by_expert(self.experts, self.settings.count)):
            index, k = (chosen == expert).nonzero(as_tuple=True)  # the tokens that chose it, each as its k-th expert
            indices.append(index)
            outputs.append(self._run_expert(linears, tokens[index]).to(weights.dtype) * weights[index, k, None])
        return torch.zeros_like(tokens, dtype=weights.dtype).index_add(0, torch.cat(indices), torch.cat(outputs))

    def _run_expert(self, linears: Linears, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]"""
        inner = [F.linear(x, *linears[name]) for name in ("gate", "up") if name in linears]
        return F.linear(self.activation(*inner), *linears["down"])


def _stacked_linears(spec: ModelSpec, ffn: int, count: int) -> nn.ModuleDict:
    """The linears of `count` experts of inner width `ffn`, the experts' rows concatenated as in the model."""
    names = ("gate", "up") if gated(spec.activation) else ("up",)
    linears = {name: nn.Linear(spec.hidden, count * ffn, bias=spec.bias) for name in names}
    return nn.ModuleDict(linears | {"down": nn.Linear(ffn, count * spec.hidden, bias=spec.bias)})


def _split_by_expert(stacked: nn.ModuleDict, count: int) -> list[Linears]:
    """The linears of each of `count` experts, as views of the stacked ones."""
    chunks = {name: [parameter.chunk(count) for parameter in linear.parameters()] for name, linear in stacked.items()}
    return [
        {name: [chunk[expert] for chunk in weight_and_bias] for name, weight_and_bias in chunks.items()}
        for expert in range(count)
    ]


def _top_k(x: Tensor, k: int) -> Tensor:
    """The indices of the k largest along the last dimension. Of equals the first ones are taken, as in the model;
    torch.topk takes any."""
    rest, indices = x.clone(), []
    for _ in range(k):
        indices.append(rest.argmax(-1, keepdim=True))
        rest.scatter_(-1, indices[-1], -torch.inf)
    return torch.cat(indices, -1)
