"""The head and the loss in one: logits live a slice of the tokens at a time, and their gradient is taken at once.

    slice of x -> logits -> loss, and at once: its gradient by the logits -> slices of dx and dW -> next slice

So a vocabulary of 128,256 costs a slice's logits and not a microbatch's. The backward pass finds its work done. Where
the vocabulary is divided over ranks, three numbers per token travel: the log of this part's sum of exponentials (MAX
over ranks), then that sum and the target's logit (SUM; label smoothing adds the sum of the logits).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fivefold.layout.sharding import slices
from fivefold.model.layers import accum_dtype
from fivefold.model.recompute import compiled


@dataclass(frozen=True)
class Targets:
    """What the model should have said. [B, S]; only targets where `mask` is True count.

    `smoothing` moves that share of a target's probability evenly onto the vocabulary; `z_loss` adds that many times the
    squared log-partition (PaLM, arXiv 2204.02311, section 5), which keeps logits from drifting.
    """

    tokens: Tensor
    mask: Tensor
    smoothing: float = 0.0
    z_loss: float = 0.0


class Vocabulary:
    """The words of a head's rows: all of them, here. Ranks that share them (`parallel/`) say how they agree."""

    def __init__(self, size: int):
        self.size, self.mine = size, range(size)
        self.most = size  # words of the rank that has the most: all take the same slices

    def gather(self, x: Tensor) -> Tensor:
        """The tokens that the head reads, [B, S, E]."""
        return x

    def agree(self, lse: Tensor, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Of the parts of the vocabulary, [N] each: the log of all sums of exponentials, and the other sums."""
        return lse, sums

    def give_back(self, dx: Tensor) -> Tensor:
        """The gradient of what `gather` was given, on its way."""
        return dx

    def arrived(self, dx: Tensor) -> Tensor:
        return dx


def head_loss(x: Tensor, weight: Tensor, targets: Targets, words: Vocabulary, compile: bool = False) -> Tensor:
    """The sum of the cross-entropies of x [B, S, E] against the targets, in at least float32."""
    kernels = _compiled() if compile else (_statistics, _logit_grad, torch.Tensor.mul_)
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return HeadLoss.apply(words, targets, learning, kernels, x, weight)


class HeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        words: Vocabulary,
        targets: Targets,
        learning: bool,
        kernels: Any,
        x: Tensor,
        weight: Tensor,
    ) -> Tensor:
        statistics, grad_of, ctx.scale = kernels
        whole = words.gather(x)
        flat, wanted, mask = whole.flatten(0, 1), targets.tokens.flatten(), targets.mask.flatten()
        total = flat.new_zeros((), dtype=accum_dtype(flat.dtype))
        dx, dw = (torch.empty_like(flat), None) if learning else (flat, None)
        for part in slices(len(flat), words.most):
            rows = slice(part.start, part.stop)
            logits = flat[rows] @ weight.T
            column = wanted[rows] - words.mine.start
            here = (column >= 0) & (column < len(words.mine))
            lse, picked, summed = statistics(logits, column, here, targets.smoothing)
            lse, sums = words.agree(lse, [picked, summed] if targets.smoothing else [picked])
            loss = lse - (1 - targets.smoothing) * sums[0]
            if targets.smoothing:
                loss = loss - targets.smoothing / words.size * sums[1]
            if targets.z_loss:
                loss = loss + targets.z_loss * lse.square()
            total += loss.masked_fill(~mask[rows], 0.0).sum()
            if learning:
                grad = grad_of(logits, lse, picked, column, here, targets.smoothing, words.size, targets.z_loss)
                del logits
                # Tokens that do not count are struck out of the small factors, not of the grad.
                counted = mask[rows, None].to(flat.dtype)
                torch.mul(grad @ weight, counted, out=dx[rows])
                if part.stop == len(flat):
                    dx = words.give_back(dx.view_as(whole))
                dw = _add_product(dw, grad, flat[rows] * counted, last=part.stop == len(flat))
                del grad  # before the next slice's logits come
        if learning:
            ctx.save_for_backward(words.arrived(dx), dw)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        dx, dw = ctx.saved_tensors
        # One number in full precision: the products are rounded, and not it.
        dx, dw = dx * gradient, ctx.scale(dw, gradient)
        return None, None, None, None, dx, dw


def _statistics(logits: Tensor, column: Tensor, here: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the log of the sum of exponentials, the target's logit where it is here, the sum if it is needed."""
    exact = accum_dtype(logits.dtype)
    if not logits.shape[-1]:
        nothing = logits.new_zeros(column.shape, dtype=exact)
        return nothing - torch.inf, nothing, nothing
    summed = logits.sum(-1, dtype=exact) if smoothing else logits.new_zeros((), dtype=exact)
    largest = logits.amax(-1).to(exact)
    below = logits - largest[:, None] if logits.dtype == exact else logits.to(exact).sub_(largest[:, None])
    lse = largest + below.exp_().sum(-1).log()
    picked = logits.gather(-1, column.masked_fill(~here, 0)[:, None])[:, 0].to(lse.dtype).masked_fill(~here, 0.0)
    return lse, picked, summed


def _logit_grad(
    logits: Tensor,
    lse: Tensor,
    picked: Tensor,
    column: Tensor,
    here: Tensor,
    smoothing: float,
    size: int,
    z_loss: float,
) -> Tensor:
    """The gradient by the logits, in their dtype: probabilities, and at the target one less. Works in place."""

    def of(logit: Tensor, lse: Tensor) -> Tensor:
        share = logit.to(lse.dtype).sub_(lse).exp_()  # in place: nobody reads the logits again
        if z_loss:
            share = share * (1 + 2 * z_loss * lse)
        return share - smoothing / size if smoothing else share

    grad = of(logits, lse[:, None]).to(logits.dtype)
    if logits.shape[-1]:
        # Rounded after the subtraction: what is left of a sure answer is small, and counts.
        index = column.masked_fill(~here, 0)[:, None]
        one_less = (of(picked.clone(), lse) - (1 - smoothing)).to(grad.dtype)
        grad.scatter_(-1, index, torch.where(here, one_less, grad.gather(-1, index)[:, 0])[:, None])
    return grad


def _add_product(total: Tensor | None, grad: Tensor, x: Tensor, last: bool) -> Tensor:
    """total + grad^T x; over several slices in full precision, and rounded once."""
    if total is None and last:
        return grad.T @ x
    total = add_product(total, grad, x)
    return total.to(x.dtype) if last else total


def add_product(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    """In full precision. A GPU's kernels add 16-bit products to a float32 sum by themselves."""
    exact = accum_dtype(x.dtype)
    if x.is_cuda and x.dtype != exact:
        if total is None:
            return torch.mm(grad.T, x, out_dtype=exact)
        return torch.addmm(total, grad.T, x, out_dtype=exact, out=total)
    product = grad.T @ x
    return product.to(exact) if total is None else total.add_(product)


@cache
def _compiled() -> tuple[Callable[..., Any], ...]:
    return compiled(_statistics), compiled(_logit_grad), compiled(_scaled)


def _scaled(x: Tensor, by: Tensor) -> Tensor:
    """In place. PyTorch's own kernel of two dtypes takes four times as long."""
    return x.mul_(by)


# ---- loss -----------------------------------------------------------------------------------------------------------
# Next-token loss as (sum, count): nothing divides but the count of the whole global batch.


_IGNORED = -100


def loss_sum(logits: Tensor, targets: Tensor, mask: Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Sum of the cross-entropies where `mask` is True, in at least float32. logits [B, S, V], the others [B, S].

    `head.Targets` says what `smoothing` and `z_loss` do.
    """
    widened = logits.to(accum_dtype(logits.dtype))
    ignored = targets.masked_fill(~mask, _IGNORED).flatten()
    total = F.cross_entropy(
        widened.flatten(0, 1), ignored, ignore_index=_IGNORED, reduction="sum", label_smoothing=smoothing
    )
    if z_loss:
        total = total + z_loss * widened.logsumexp(-1).square().masked_fill(~mask, 0.0).sum()
    return total
