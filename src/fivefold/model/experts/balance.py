"""What keeps the load of experts even, in every layout alike.

balance loss   of each row of the batch (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): the share of the row's slots
               that an expert got, times the mean of its normalised scores, summed over experts. 1 where all are equal.
z loss         the squared log-partition of the router's logits (ST-MoE, arXiv 2202.08906), which keeps them small
bias           added to the scores for the choice alone; after a step, up for experts below the mean load, down above

Both losses are divided by numbers of the whole global batch, of rows and of tokens. So they are sums, as the loss of
tokens is: how the batch was cut does not matter. They reach the backward pass where they are made, in whichever stage
that is (`AddLoss`), and are no part of the loss that is reported.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.model.experts.router import Routed
from fivefold.spec.experts import Experts


@dataclass(frozen=True)
class Balance:
    """The factors of the losses, and what they are divided by."""

    loss: float = 0.0
    z_loss: float = 0.0
    rows: int = 1  # of the global batch
    tokens: int = 1  # of the global batch

    @property
    def wanted(self) -> bool:
        return self.loss > 0 or self.z_loss > 0


UNBALANCED = Balance()


class AddLoss(Function):
    """x as it is; in the backward pass `loss` is differentiated too, as if it had been added to the end of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.kind = loss.dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=ctx.kind, device=gradient.device)


def row_counts(routed: Routed, rows: Tensor, count: int) -> Tensor:
    """How often the tokens of each of `count` rows chose each expert, int64 [B, X]; `rows` [n]: the tokens'."""
    (slots, experts), order = (routed.chosen.shape[1], routed.scores.shape[1]), routed.order
    # In their order slots ascend by expert and, within an expert, by row.
    sorted_ = routed.chosen.flatten()[order] * count + rows[order // slots]
    every = torch.arange(experts * count, device=order.device)
    ends = torch.searchsorted(sorted_, every, right=True)
    return ends.diff(prepend=ends.new_zeros(1)).view(experts, count).T.contiguous()


def balance_loss(experts: Experts, routed: Routed, rows: Tensor, counts: Tensor, length: int) -> Tensor:
    """The sum over rows, of this rank's tokens. `counts` [B, X] are those of whole rows of `length` tokens."""
    share = counts.to(routed.scores.dtype) * (experts.count / (experts.top_k * length))
    scores = routed.scores
    if experts.scores == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    return (share[rows] * scores).sum() / length


def z_loss(routed: Routed) -> Tensor:
    """The sum over this rank's tokens."""
    return routed.logits.logsumexp(-1).square().sum()


@torch.no_grad()
def follow_load(bias: Tensor, load: Tensor, rate: float) -> None:
    """Move the bias of every expert by `rate`, towards an equal load. `load` [X] is of the whole global batch."""
    behind = load.sum() - len(load) * load  # whole numbers: the same on every rank
    bias.add_(behind.sign().to(bias.dtype), alpha=rate)
