"""Fused linear + cross-entropy: the head and the loss in one function, a slice of the tokens at a time.

    slice of x -> logits -> loss, and at once: its gradient by the logits -> slices of dx and dW -> next slice

Only one slice of logits is ever held, not a microbatch's. The gradients are computed in the forward pass; backward only
scales them. Where the vocabulary is sharded (`VocabParallel` in `parallel/tensor.py`), three scalars per token are
reduced: the log-sum-exp of this rank's words (MAX), then the sum of exponentials and the target's logit (SUM; label
smoothing adds the sum of the logits).
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
    """The target tokens, [B, S]; only those where `mask` is True count.

    `smoothing` moves that share of a target's probability evenly onto the vocabulary; `z_loss` adds that many times the
    squared log-partition (PaLM, arXiv 2204.02311, section 5), which keeps logits from drifting.
    """

    tokens: Tensor
    mask: Tensor
    smoothing: float = 0.0
    z_loss: float = 0.0


class Vocabulary:
    """The rows of the head that this rank has: all of them. Where ranks share them (`VocabParallel` in
    `parallel/tensor.py`), the methods are collectives."""

    def __init__(self, size: int):
        self.size, self.local = size, range(size)
        self.largest = size  # the largest number of rows on any rank: all ranks cut the same slices

    def gather(self, x: Tensor) -> Tensor:
        """The tokens that the head reads, [B, S, E]."""
        return x

    def combine(self, lse: Tensor, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """[N] each, reduced over the shards of the vocabulary: the log-sum-exp, and the other sums."""
        return lse, sums

    def start_reduce(self, dx: Tensor) -> Tensor:
        """Start to reduce the gradient of `gather`'s output to that of its input."""
        return dx

    def finish_reduce(self, dx: Tensor) -> Tensor:
        """Wait for that reduction."""
        return dx


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Targets, vocabulary: Vocabulary, *, compile: bool = False
) -> Tensor:
    """The sum of the cross-entropies of x [B, S, E] against the targets, in at least float32."""
    kernels = _compiled() if compile else (_statistics, _logit_grad, torch.Tensor.mul_)
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return LinearCrossEntropy.apply(vocabulary, targets, learning, kernels, x, weight)


class LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        vocabulary: Vocabulary,
        targets: Targets,
        learning: bool,
        kernels: Any,
        x: Tensor,
        weight: Tensor,
    ) -> Tensor:
        statistics, grad_of, ctx.scale = kernels
        gathered = vocabulary.gather(x)
        flat, tokens, mask = gathered.flatten(0, 1), targets.tokens.flatten(), targets.mask.flatten()
        total = flat.new_zeros((), dtype=accum_dtype(flat.dtype))
        dx, dw = (torch.empty_like(flat), None) if learning else (flat, None)
        for part in slices(len(flat), vocabulary.largest):
            rows = slice(part.start, part.stop)
            logits = flat[rows] @ weight.T
            column = tokens[rows] - vocabulary.local.start
            is_local = (column >= 0) & (column < len(vocabulary.local))
            lse, picked, summed = statistics(logits, column, is_local, targets.smoothing)
            lse, sums = vocabulary.combine(lse, [picked, summed] if targets.smoothing else [picked])
            loss = lse - (1 - targets.smoothing) * sums[0]
            if targets.smoothing:
                loss = loss - targets.smoothing / vocabulary.size * sums[1]
            if targets.z_loss:
                loss = loss + targets.z_loss * lse.square()
            total += loss.masked_fill(~mask[rows], 0.0).sum()
            if learning:
                extras = targets.smoothing, vocabulary.size, targets.z_loss
                grad = grad_of(logits, lse, picked, column, is_local, *extras)
                del logits
                # The mask is applied to the small factors, not to the gradient of the logits.
                counted = mask[rows, None].to(flat.dtype)
                torch.mul(grad @ weight, counted, out=dx[rows])
                if part.stop == len(flat):
                    dx = vocabulary.start_reduce(dx.view_as(gathered))
                dw = _add_product(dw, grad, flat[rows] * counted, last=part.stop == len(flat))
                del grad  # before the next slice's logits are allocated
        if learning:
            ctx.save_for_backward(vocabulary.finish_reduce(dx), dw)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        dx, dw = ctx.saved_tensors
        # A scalar in full precision: only the products are rounded.
        dx, dw = dx * gradient, ctx.scale(dw, gradient)
        return None, None, None, None, dx, dw


def _statistics(logits: Tensor, column: Tensor, is_local: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each row: the log-sum-exp, the target's logit if it is in this shard, the logits' sum if it is needed."""
    dtype = accum_dtype(logits.dtype)
    if not logits.shape[-1]:
        zeros = logits.new_zeros(column.shape, dtype=dtype)
        return zeros - torch.inf, zeros, zeros
    summed = logits.sum(-1, dtype=dtype) if smoothing else logits.new_zeros((), dtype=dtype)
    largest = logits.amax(-1).to(dtype)
    below = logits - largest[:, None] if logits.dtype == dtype else logits.to(dtype).sub_(largest[:, None])
    lse = largest + below.exp_().sum(-1).log()
    index = column.masked_fill(~is_local, 0)[:, None]
    picked = logits.gather(-1, index)[:, 0].to(lse.dtype).masked_fill(~is_local, 0.0)
    return lse, picked, summed


def _logit_grad(
    logits: Tensor,
    lse: Tensor,
    picked: Tensor,
    column: Tensor,
    is_local: Tensor,
    smoothing: float,
    size: int,
    z_loss: float,
) -> Tensor:
    """The gradient by the logits, in their dtype and place: the probabilities, minus one at the target."""

    def of(logit: Tensor, lse: Tensor) -> Tensor:
        share = logit.to(lse.dtype).sub_(lse).exp_()  # in place: nobody reads the logits again
        if z_loss:
            share = share * (1 + 2 * z_loss * lse)
        return share - smoothing / size if smoothing else share

    grad = of(logits, lse[:, None]).to(logits.dtype)
    if logits.shape[-1]:
        # Rounded after the subtraction: for a confident answer the difference is small, and matters.
        index = column.masked_fill(~is_local, 0)[:, None]
        at_target = (of(picked.clone(), lse) - (1 - smoothing)).to(grad.dtype)
        grad.scatter_(-1, index, torch.where(is_local, at_target, grad.gather(-1, index)[:, 0])[:, None])
    return grad


def _add_product(total: Tensor | None, grad: Tensor, x: Tensor, last: bool) -> Tensor:
    """total + grad^T x; summed over slices in full precision, and rounded once."""
    if total is None and last:
        return grad.T @ x
    total = add_product(total, grad, x)
    return total.to(x.dtype) if last else total


def add_product(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    """total + grad^T x in full precision; a GPU's kernels accumulate 16-bit products in float32 themselves."""
    dtype = accum_dtype(x.dtype)
    if x.is_cuda and x.dtype != dtype:
        if total is None:
            return torch.mm(grad.T, x, out_dtype=dtype)
        return torch.addmm(total, grad.T, x, out_dtype=dtype, out=total)
    product = grad.T @ x
    return product.to(dtype) if total is None else total.add_(product)


@cache
def _compiled() -> tuple[Callable[..., Any], ...]:
    return compiled(_statistics), compiled(_logit_grad), compiled(_scaled)


def _scaled(x: Tensor, by: Tensor) -> Tensor:
    """x times a scalar, in place. PyTorch's own kernel of two dtypes takes four times as long."""
    return x.mul_(by)


# ---- loss -----------------------------------------------------------------------------------------------------------
# The unfused loss, for logits that exist. A sum: only the count of the whole global batch divides it.


_IGNORED = -100


def loss_sum(logits: Tensor, targets: Tensor, mask: Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Sum of the cross-entropies where `mask` is True, in at least float32. logits [B, S, V], the others [B, S].

    `Targets` says what `smoothing` and `z_loss` do.
    """
    widened = logits.to(accum_dtype(logits.dtype))
    ignored = targets.masked_fill(~mask, _IGNORED).flatten()
    total = F.cross_entropy(
        widened.flatten(0, 1), ignored, ignore_index=_IGNORED, reduction="sum", label_smoothing=smoothing
    )
    if z_loss:
        total = total + z_loss * widened.logsumexp(-1).square().masked_fill(~mask, 0.0).sum()
    return total
