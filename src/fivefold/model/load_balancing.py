"""Load balancing of experts, the same in every layout.

balance loss   for each row of the batch (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): the share of the row's tokens
               that an expert got, times the mean of its normalised scores, summed over experts; 1 if all are equal
z loss         the squared log-partition of the router's logits (ST-MoE, arXiv 2202.08906), which keeps them small
bias           added to the scores for the choice alone; after a step, up for experts below the mean load, down above

Both losses are divided by counts of the global batch, of rows and of tokens. So they are sums, like the loss of
tokens, and do not depend on how the batch is divided. They enter the backward pass where they are computed, in
whichever stage that is (`AddLoss`), and are not part of the reported loss.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.model.router import Routing
from fivefold.spec.blocks import Experts


@dataclass(frozen=True)
class Balance:
    """The coefficients of the losses, and their divisors."""

    loss: float = 0.0
    z_loss: float = 0.0
    rows: int = 1  # of the global batch
    tokens: int = 1  # of the global batch

    @property
    def has_losses(self) -> bool:
        return self.loss > 0 or self.z_loss > 0


UNBALANCED = Balance()  # no losses


class AddLoss(Function):
    """x unchanged; in the backward pass `loss` is differentiated too, as if it were added to the model's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=ctx.loss_dtype, device=gradient.device)


def row_counts(routing: Routing, rows: Tensor, count: int) -> Tensor:
    """How often the tokens of each row of the batch chose each expert, int64 [B, X].

    `rows` [n] has the row of each token, `count` is the number of rows.
    """
    (top_k, experts), order = (routing.chosen.shape[1], routing.scores.shape[1]), routing.order
    # In `order` assignments ascend by expert and, within an expert, by row.
    sorted_ = routing.chosen.flatten()[order] * count + rows[order // top_k]
    ends = torch.searchsorted(sorted_, torch.arange(experts * count, device=order.device), right=True)
    return ends.diff(prepend=ends.new_zeros(1)).view(experts, count).T.contiguous()


def balance_loss(experts: Experts, routing: Routing, rows: Tensor, counts: Tensor, length: int) -> Tensor:
    """The sum over rows, for this rank's tokens. `counts` [B, X] are of whole rows of `length` tokens."""
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
    # The mean load less the expert's, times the number of experts: whole numbers, so the same on every rank.
    behind = tokens_per_expert.sum() - len(tokens_per_expert) * tokens_per_expert
    bias.add_(behind.sign().to(bias.dtype), alpha=rate)
