"""Mixture of experts, in place of a block's dense network; with the losses and the bias that balance its load."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.model.grouped import Groups
from fivefold.model.layers import ACTIVATIONS, TokenPositions, gated
from fivefold.model.mlp import FeedForward
from fivefold.model.ops import LocalOps
from fivefold.model.router import Router, Routing
from fivefold.spec.blocks import Experts
from fivefold.spec.kinds import BlockKind
from fivefold.spec.model import ModelSpec

# ---- balance --------------------------------------------------------------------------------------------------------
# Load balancing of experts, the same in every layout.
#
# balance loss   for each row of the batch (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): the share of the row's tokens
#                that an expert got, times the mean of its normalised scores, summed over experts; 1 if all are equal
# z loss         the squared log-partition of the router's logits (ST-MoE, arXiv 2202.08906), which keeps them small
# bias           added to the scores for the choice alone; after a step, up for experts below the mean load, down above
#
# Both losses are divided by counts of the global batch, of rows and of tokens. So they are sums, like the loss of
# tokens, and do not depend on how the batch is divided. They enter the backward pass where they are computed, in
# whichever stage that is (`AddLoss`), and are not part of the reported loss.


@dataclass(frozen=True)
class Balance:
    """The coefficients of the losses, and their divisors."""

    loss: float = 0.0
    z_loss: float = 0.0
    rows: int = 1  # of the global batch
    tokens: int = 1  # of the global batch

    @property
    def wanted(self) -> bool:
        return self.loss > 0 or self.z_loss > 0


UNBALANCED = Balance()


class AddLoss(Function):
    """x unchanged; in the backward pass `loss` is differentiated too, as if it were added to the model's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.kind = loss.dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=ctx.kind, device=gradient.device)


def row_counts(routing: Routing, rows: Tensor, count: int) -> Tensor:
    """How often the tokens of each of `count` rows chose each expert, int64 [B, X]; `rows` [n]: the tokens'."""
    (top_k, experts), order = (routing.chosen.shape[1], routing.scores.shape[1]), routing.order
    # In `order` assignments ascend by expert and, within an expert, by row.
    sorted_ = routing.chosen.flatten()[order] * count + rows[order // top_k]
    ends = torch.searchsorted(sorted_, torch.arange(experts * count, device=order.device), right=True)
    return ends.diff(prepend=ends.new_zeros(1)).view(experts, count).T.contiguous()


def balance_loss(experts: Experts, routing: Routing, rows: Tensor, counts: Tensor, length: int) -> Tensor:
    """The sum over rows, for this rank's tokens. `counts` [B, X] are those of whole rows of `length` tokens."""
    share = counts.to(routing.scores.dtype) * (experts.count / (experts.top_k * length))
    scores = routing.scores
    if experts.scores == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    return (share[rows] * scores).sum() / length


def z_loss(routing: Routing) -> Tensor:
    """The sum over this rank's tokens."""
    return routing.logits.logsumexp(-1).square().sum()


@torch.no_grad()
def update_expert_bias(bias: Tensor, tokens_per_expert: Tensor, rate: float) -> None:
    """Move the bias of every expert by `rate`, towards an equal load. The counts [X] are of the whole global batch."""
    # Integers: the same on every rank.
    behind = tokens_per_expert.sum() - len(tokens_per_expert) * tokens_per_expert
    bias.add_(behind.sign().to(bias.dtype), alpha=rate)


# ---- mixture --------------------------------------------------------------------------------------------------------


# Of one microbatch: tokens per expert [X], and balance loss and z loss [2], if they are used.
RouterStats = tuple[Tensor, Tensor | None]


class ExpertLinear(nn.Module):
    """One linear of every expert; the weights are one matrix, [X * O, I]."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts * outputs)) if bias else None


class ExpertNetworks(nn.Module):
    """The feed-forward networks of all experts, on rows sorted by expert."""

    def __init__(self, spec: ModelSpec, ops: LocalOps):
        super().__init__()
        assert spec.experts is not None
        self.ops, count, ffn = ops, spec.experts.count, spec.experts.ffn
        self.gate = ExpertLinear(count, spec.hidden, ffn, spec.bias) if gated(spec.activation) else None
        self.up = ExpertLinear(count, spec.hidden, ffn, spec.bias)
        self.down = ExpertLinear(count, ffn, spec.hidden, spec.bias)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        linear = self.ops.dispatch.linear
        up = linear(x, self.up, groups)
        inner = self.activation(up) if self.gate is None else self.activation(linear(x, self.gate, groups), up)
        return linear(inner, self.down, groups, last=True)


class MoE(nn.Module):
    def __init__(self, kind: BlockKind, spec: ModelSpec, ops: LocalOps):
        super().__init__()
        assert spec.experts is not None
        self.spec, self.ops, self.balance = spec.experts, ops, UNBALANCED
        self.router = Router(spec)
        self.experts = ExpertNetworks(spec, ops)
        self.shared = FeedForward(spec, ops, spec.experts.shared_ffn) if spec.experts.shared else None
        self.losses: Tensor | None = None  # [2] balance loss and z loss since the step began
        if ops.compiled and not ops.dispatch.in_graph:  # row counts are not constants of a graph
            self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign]

    def forward(self, x: Tensor, positions: TokenPositions) -> tuple[Tensor, RouterStats]:
        """x [B, S, E]; `positions` are those of its tokens."""
        dispatch = self.ops.dispatch
        tokens = own = dispatch.own_tokens(x)
        if positions.real is not None:  # padding is not routed
            real = (dispatch.batch_rows(x) < positions.real).nonzero().flatten()
            tokens = own[real]
        bias = None if self.router.bias is None else self.ops.weight(self.router, "bias")
        routing = self.router(tokens, self.ops.weight(self.router), bias)
        losses = None
        if self.training and self.balance.wanted:
            routing, losses = self._with_losses(routing, x, positions)
        shared_expert = None if self.shared is None else partial(self.shared, x)
        y, shared = dispatch.run(tokens, routing, self.experts, x.shape[0] * x.shape[1], shared_expert)
        if positions.real is not None:
            y = torch.zeros_like(own).index_copy(0, real, y)
        y = dispatch.all_tokens(y, x)
        return y if shared is None else y + shared, (routing.counts, losses)

    def count(self, stats: RouterStats) -> None:
        """Add the stats of a microbatch: once, however often its block is recomputed."""
        counts, losses = stats
        self.router.count(counts)
        if losses is not None:
            self.losses = losses if self.losses is None else self.losses + losses

    def _with_losses(self, routing: Routing, x: Tensor, positions: TokenPositions) -> tuple[Routing, Tensor]:
        """The same routing, whose backward pass also differentiates the losses; and the losses."""
        balance, losses = self.balance, [routing.scores.new_zeros(()), routing.scores.new_zeros(())]
        if balance.loss:
            rows = self.ops.dispatch.batch_rows(x)
            counts = self.ops.dispatch.sum_over_sequence(row_counts(routing, rows, x.shape[0]))
            losses[0] = balance_loss(self.spec, routing, rows, counts, positions.length) / balance.rows
        if balance.z_loss:
            losses[1] = z_loss(routing) / balance.tokens
        weights = AddLoss.apply(routing.weights, balance.loss * losses[0] + balance.z_loss * losses[1])
        return replace(routing, weights=weights), torch.stack(losses).detach()
