"""Cross-entropy over logits whose vocabulary is dealt out over tp: they are never gathered.

Three numbers per token travel: the largest logit (an all-reduce MAX of [B, S]), then the sum of exponentials and the
target's logit (an all-reduce SUM of [2, B, S]; label smoothing adds the sum of the logits, [3, B, S]).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.model.dtypes import wide
from fivefold.parallel.collectives import all_reduce, wait
from fivefold.parallel.mesh import Axis


class VocabularyLoss(Function):
    """The sum of `model.loss.loss_sum`, and this rank's part of its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        axis: Axis,
        mine: range,
        vocab: int,
        logits: Tensor,  # [B, S, V/tp]
        targets: Tensor,
        mask: Tensor,
        smoothing: float,
        z_loss: float,
    ) -> Tensor:
        widened = logits.to(wide(logits.dtype))
        largest = widened.amax(-1) if len(mine) else widened.new_full(targets.shape, -torch.inf)
        largest = wait(all_reduce(largest, axis, "max"), axis)
        column = targets - mine.start
        here = (column >= 0) & (column < len(mine))
        sums = [(widened - largest[..., None]).exp().sum(-1), _pick(widened, column, here)]
        if smoothing:
            sums.append(widened.sum(-1))
        summed = wait(all_reduce(torch.stack(sums), axis), axis)
        lse = largest + summed[0].log()
        loss = lse - (1 - smoothing) * summed[1]
        if smoothing:
            loss = loss - smoothing / vocab * summed[2]
        if z_loss:
            loss = loss + z_loss * lse.square()
        ctx.vocab, ctx.smoothing, ctx.z_loss = vocab, smoothing, z_loss
        ctx.save_for_backward(logits, lse, column, here, mask)
        return loss.masked_fill(~mask, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        logits, lse, column, here, mask = ctx.saved_tensors
        slope = (logits.to(wide(logits.dtype)) - lse[..., None]).exp()
        if ctx.z_loss:
            slope *= (1 + 2 * ctx.z_loss * lse)[..., None]
        if ctx.smoothing:
            slope -= ctx.smoothing / ctx.vocab
        if slope.shape[-1]:
            one = here.to(slope.dtype)[..., None] * (ctx.smoothing - 1)
            slope.scatter_add_(-1, column.masked_fill(~here, 0)[..., None], one)
        slope = slope.masked_fill(~mask[..., None], 0.0) * gradient
        return None, None, None, slope.to(logits.dtype), None, None, None, None


def _pick(logits: Tensor, column: Tensor, here: Tensor) -> Tensor:
    """The target's logit where this rank has it, 0 elsewhere."""
    if not logits.shape[-1]:
        return logits.new_zeros(column.shape)
    return logits.gather(-1, column.masked_fill(~here, 0)[..., None])[..., 0].masked_fill(~here, 0.0)
