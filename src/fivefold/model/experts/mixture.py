"""The mixture: what a block with experts has in place of a dense network."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.model.activations import ACTIVATIONS, gated
from fivefold.model.experts.balance import AddLoss, Balance, balance_loss, row_counts, z_loss
from fivefold.model.experts.grouped import Groups
from fivefold.model.experts.router import Routed, Router
from fivefold.model.ops import LocalOps
from fivefold.model.positions import TokenPositions
from fivefold.spec.model import ModelSpec

# Of a microbatch: tokens of each expert [X], and the balance loss and z loss [2] where there are such.
Told = tuple[Tensor, Tensor | None]


class StackedLinear(nn.Module):
    """A linear of every expert; their weights lie one below the other, [X * O, I]."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts * outputs)) if bias else None


class ExpertNetworks(nn.Module):
    """The feed-forward networks of all experts. They compute rows that lie expert by expert."""

    def __init__(self, spec: ModelSpec, ops: LocalOps):
        super().__init__()
        assert spec.experts is not None
        self.ops, count, ffn = ops, spec.experts.count, spec.experts.ffn
        self.gate = StackedLinear(count, spec.hidden, ffn, spec.bias) if gated(spec.activation) else None
        self.up = StackedLinear(count, spec.hidden, ffn, spec.bias)
        self.down = StackedLinear(count, ffn, spec.hidden, spec.bias)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        linear = self.ops.dispatch.linear
        up = linear(x, self.up, groups)
        inner = self.activation(up) if self.gate is None else self.activation(linear(x, self.gate, groups), up)
        return linear(inner, self.down, groups, last=True)


class Mixture(nn.Module):
    def __init__(self, spec: ModelSpec, ops: LocalOps, shared: nn.Module | None, balance: Balance):
        super().__init__()
        assert spec.experts is not None
        self.spec, self.ops, self.balance = spec.experts, ops, balance
        self.router = Router(spec)
        self.experts = ExpertNetworks(spec, ops)
        self.shared = shared
        self.losses: Tensor | None = None  # [2] balance loss and z loss since the step began
        if ops.compiled and not ops.dispatch.in_graph:  # how many tokens go where is no constant of a graph
            self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign]

    def forward(self, x: Tensor, positions: TokenPositions) -> tuple[Tensor, Told]:
        """x [B, S, E]; `positions` are those of its tokens."""
        dispatch = self.ops.dispatch
        tokens = own = dispatch.own_tokens(x)
        if positions.real is not None:  # what only fills a batch up is not routed
            chosen = (dispatch.rows(x) < positions.real).nonzero().flatten()
            tokens = own[chosen]
        bias = None if self.router.bias is None else self.ops.weight(self.router, "bias")
        routed = self.router(tokens, self.ops.weight(self.router), bias)
        losses = None
        if self.training and self.balance.wanted:
            routed, losses = self._with_losses(routed, x, positions)
        beside = None if self.shared is None else partial(self.shared, x)
        y, shared = dispatch.run(tokens, routed, self.experts, x.shape[0] * x.shape[1], beside)
        if positions.real is not None:
            y = torch.zeros_like(own).index_copy(0, chosen, y)
        y = dispatch.all_tokens(y, x)
        return y if shared is None else y + shared, (routed.counts, losses)

    def count(self, told: Told) -> None:
        """What `forward` told of a microbatch: once, however often its block runs for a backward pass."""
        counts, losses = told
        self.router.count(counts)
        if losses is not None:
            self.losses = losses if self.losses is None else self.losses + losses

    def _with_losses(self, routed: Routed, x: Tensor, positions: TokenPositions) -> tuple[Routed, Tensor]:
        """The same, whose backward pass differentiates the losses too; and these."""
        asked, losses = self.balance, [routed.scores.new_zeros(()), routed.scores.new_zeros(())]
        if asked.loss:
            rows = self.ops.dispatch.rows(x)
            counts = self.ops.dispatch.over_sequence(row_counts(routed, rows, x.shape[0]))
            losses[0] = balance_loss(self.spec, routed, rows, counts, positions.length) / asked.rows
        if asked.z_loss:
            losses[1] = z_loss(routed) / asked.tokens
        weights = AddLoss.apply(routed.weights, asked.loss * losses[0] + asked.z_loss * losses[1])
        return replace(routed, weights=weights), torch.stack(losses).detach()
