"""The router: which experts a token visits, and how much each of them counts.

Scores are at least float32, and equal scores are decided by the expert's number: no layout may send a token elsewhere.
Shapes: n tokens, E hidden, X experts, K of them for each token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.model.dtypes import wide
from fivefold.spec.experts import Experts
from fivefold.spec.model import ModelSpec


@dataclass(frozen=True)
class Routed:
    """Where tokens go."""

    chosen: Tensor  # [n, K] numbers of experts, the best first
    weights: Tensor  # [n, K] what each of them counts
    scores: Tensor  # [n, X] of all experts
    logits: Tensor  # [n, X] before they became scores
    order: Tensor  # [n * K] the slots in the order of their experts, then of the tokens
    ends: Tensor  # int32 [X] where in this order those of each expert end

    @property
    def counts(self) -> Tensor:
        """[X] slots that each expert has."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).to(torch.int64)


class Router(nn.Module):
    """One linear, and the choice of the best. `balance` helps to choose and does not weigh; see `balance.py`."""

    balance: Tensor | None

    def __init__(self, spec: ModelSpec):
        super().__init__()
        assert spec.experts is not None
        self.experts = spec.experts
        self.weight = nn.Parameter(torch.empty(self.experts.count, spec.hidden))
        self.bias = nn.Parameter(torch.empty(self.experts.count)) if spec.bias else None
        balance = torch.zeros(self.experts.count) if self.experts.balance_bias else None
        self.register_buffer("balance", balance, persistent=False)
        self.load: Tensor | None = None  # [X] tokens that each expert got since the step began
        # A proof looks at what is chosen, and may choose itself: see `verify/routing.py`.
        self.choose: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Routed:
        """x [n, E]; the parameters are given, because ranks may share them."""
        kind = wide(x.dtype)
        logits = F.linear(x.to(kind), weight.to(kind), None if bias is None else bias.to(kind))
        scores = logits.softmax(-1) if self.experts.scores == "softmax" else logits.sigmoid()
        chosen = self.best(scores) if self.choose is None else self.choose(scores)
        weights = scores.gather(1, chosen)
        if self.experts.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(kind).tiny)
        return Routed(chosen, weights * self.experts.scale, scores, logits, *in_order(chosen, self.experts.count))

    def count(self, counts: Tensor) -> None:
        """Of a microbatch."""
        self.load = counts if self.load is None else self.load + counts

    @torch.no_grad()
    def best(self, scores: Tensor) -> Tensor:
        """The numbers of the K best experts, [n, K], the best first."""
        wish = scores if self.balance is None else scores + self.balance
        return best(self.experts, wish)


@torch.no_grad()
def in_order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The slots in the order of their experts, and where each expert's end. The host need not know."""
    sorted_, order = chosen.flatten().to(torch.int32).sort(stable=True)
    every = torch.arange(experts, dtype=torch.int32, device=chosen.device)
    return order, torch.searchsorted(sorted_, every, right=True, out_int32=True)


def best(experts: Experts, wish: Tensor) -> Tensor:
    """The K best of [n, X], the first of equals; only among the best groups, where there are groups."""
    if experts.groups > 1:
        groups = wish.unflatten(-1, (experts.groups, -1))
        heads = groups.sort(dim=-1, descending=True).values[..., : experts.group_scores].sum(-1)
        out = heads.sort(dim=-1, descending=True, stable=True).indices[..., experts.top_groups :]
        closed = torch.zeros_like(heads, dtype=torch.bool).scatter_(-1, out, True)
        wish = groups.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    return wish.sort(dim=-1, descending=True, stable=True).indices[..., : experts.top_k].clone()
