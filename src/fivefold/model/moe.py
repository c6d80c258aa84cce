"""Mixture of experts, in place of a block's dense network."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.model.grouped import Groups
from fivefold.model.layers import ACTIVATIONS, TokenPositions, gated
from fivefold.model.load_balancing import UNBALANCED, AddLoss, balance_loss, row_counts, z_loss
from fivefold.model.mlp import FeedForward
from fivefold.model.ops import LocalOps
from fivefold.model.router import Router, Routing
from fivefold.spec.kinds import BlockKind
from fivefold.spec.model import ModelSpec

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
        """x [B, S, E]; `positions`: of its tokens."""
        dispatch = self.ops.dispatch
        tokens = own = dispatch.own_tokens(x)
        if positions.real is not None:  # padding is not routed
            real = (dispatch.batch_rows(x) < positions.real).nonzero().flatten()
            tokens = own[real]
        bias = None if self.router.bias is None else self.ops.weight(self.router, "bias")
        routing = self.router(tokens, self.ops.weight(self.router), bias)
        losses = None
        if self.training and self.balance.has_losses:
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
