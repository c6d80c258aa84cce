"""The router of a mixture of experts: which experts a token visits (top-k), and the weight of each.

Scores are at least float32, and of equal scores the lower expert index wins: no layout may route a token differently.
Shapes: n tokens, E hidden, X experts, K of them for each token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.model.layers import accum_dtype
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec


@dataclass(frozen=True)
class Routing:
    """The experts that each token was sent to, and their weights. An assignment is one (token, expert) pair."""

    chosen: Tensor  # [n, K] expert indices, the best first
    weights: Tensor  # [n, K] of the experts' outputs
    scores: Tensor  # [n, X] of all experts
    logits: Tensor  # [n, X] before softmax or sigmoid
    order: Tensor  # [n * K] the assignments sorted by expert, then by token
    ends: Tensor  # int32 [X] where each expert's assignments end in `order`

    @property
    def counts(self) -> Tensor:
        """[X] number of assignments of each expert."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).to(torch.int64)


class Router(nn.Module):
    """One linear, and the choice of the top K. The bias `balance` is added to the scores for the choice alone, not for
    the weights; see `load_balancing.py`."""

    balance: Tensor | None

    def __init__(self, spec: ModelSpec):
        super().__init__()
        assert spec.experts is not None
        self.experts = spec.experts
        self.weight = nn.Parameter(torch.empty(self.experts.count, spec.hidden))
        self.bias = nn.Parameter(torch.empty(self.experts.count)) if spec.bias else None
        balance = torch.zeros(self.experts.count) if self.experts.balance_bias else None
        self.register_buffer("balance", balance, persistent=False)
        self.tokens_per_expert: Tensor | None = None  # [X] tokens that each expert got since the step began
        # Replaces `top_k`: the verifier records the choices, and may impose others (`verifier/rank.py`).
        self.choose: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Routing:
        """x [n, E]; the parameters are given, because ranks may share them."""
        dtype = accum_dtype(x.dtype)
        logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        scores = logits.softmax(-1) if self.experts.scores == "softmax" else logits.sigmoid()
        chosen = self.top_k(scores) if self.choose is None else self.choose(scores)
        weights = scores.gather(1, chosen)
        if self.experts.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(dtype).tiny)
        return Routing(
            chosen, weights * self.experts.scale, scores, logits, *sort_by_expert(chosen, self.experts.count)
        )

    def count(self, counts: Tensor) -> None:
        """Add a microbatch's number of assignments of each expert."""
        self.tokens_per_expert = counts if self.tokens_per_expert is None else self.tokens_per_expert + counts

    @torch.no_grad()
    def top_k(self, scores: Tensor) -> Tensor:
        """The indices of the K best experts, [n, K], the best first."""
        return top_k_experts(self.experts, scores if self.balance is None else scores + self.balance)


@torch.no_grad()
def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The assignments sorted by expert, and where each expert's end; computed on the device, without a wait."""
    sorted_, order = chosen.flatten().to(torch.int32).sort(stable=True)
    indices = torch.arange(experts, dtype=torch.int32, device=chosen.device)
    return order, torch.searchsorted(sorted_, indices, right=True, out_int32=True)


def top_k_experts(experts: Experts, scores: Tensor) -> Tensor:
    """The K best of [n, X], the first of equal ones; with expert groups, only from the best groups."""
    if experts.groups > 1:
        groups = scores.unflatten(-1, (experts.groups, -1))
        group_scores = groups.sort(dim=-1, descending=True).values[..., : experts.scores_per_group].sum(-1)
        others = group_scores.sort(dim=-1, descending=True, stable=True).indices[..., experts.top_groups :]
        excluded = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, others, True)
        scores = groups.masked_fill(excluded[..., None], -torch.inf).flatten(-2)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., : experts.top_k].clone()
