"""Fused linear + loss: the head and the loss in one function, a slice of the tokens at a time.

    slice of x -> logits -> loss, and at once: its gradient by the logits -> slices of dx and dW -> next slice

Only one slice of logits is ever held, not a microbatch's. The gradients are computed in the forward pass; backward only
scales them. Where the vocabulary is sharded (`VocabParallel` in `parallel/vocab.py`), some scalars per token are
reduced: the log-sum-exp of this rank's words (MAX), then the sum of exponentials and the sums of the loss (SUM;
cross-entropy has the target's logit, and for label smoothing the sum of the logits).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.layout.logit_slices import slices
from fivefold.losses.base import Loss, Words
from fivefold.losses.cross_entropy import PLAIN
from fivefold.model.compiler import compile_function
from fivefold.model.layers import accum_dtype
from fivefold.support.plugin_calls import value_text, wrong


@dataclass(frozen=True)
class Targets:
    """The target tokens, [B, S]; only those where `mask` is True count."""

    tokens: Tensor
    mask: Tensor
    loss: Loss = PLAIN


class Vocabulary:
    """The rows of the head that this rank has: all of them. Where ranks share them (`VocabParallel` in
    `parallel/vocab.py`), the methods are collectives."""

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
        """Start to reduce the gradient of `gather`'s output to the gradient of its input."""
        return dx

    def finish_reduce(self, dx: Tensor) -> Tensor:
        """Wait for that reduction."""
        return dx


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Targets, vocabulary: Vocabulary, *, compile: bool = False
) -> Tensor:
    """The sum of the losses of x [B, S, E] against the targets, in at least float32."""
    kernels = _compile_kernels() if compile else (_statistics, _slope, torch.Tensor.mul_)
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
        statistics, slope, ctx.scale = kernels
        loss = targets.loss
        gathered = vocabulary.gather(x)
        flat, tokens, mask = gathered.flatten(0, 1), targets.tokens.flatten(), targets.mask.flatten()
        total = flat.new_zeros((), dtype=accum_dtype(flat.dtype))
        dx, dw = (torch.empty_like(flat), None) if learning else (flat, None)
        for part in slices(len(flat), vocabulary.largest):
            rows = slice(part.start, part.stop)
            logits = flat[rows] @ weight.T
            column = tokens[rows] - vocabulary.local.start
            is_local = (column >= 0) & (column < len(vocabulary.local))
            words = Words(column, is_local, vocabulary.size, accum_dtype(logits.dtype))
            lse, sums = statistics(loss, logits, words)
            lse, sums = vocabulary.combine(lse, _sums(loss, sums, lse))
            values = _one_each(loss, "value", loss.value(lse, sums, vocabulary.size), lse)
            total += values.masked_fill(~mask[rows], 0.0).sum()
            if learning:
                grad = slope(loss, logits, lse, sums, words)
                if not isinstance(grad, Tensor) or (grad.shape, grad.dtype) != (logits.shape, logits.dtype):
                    raise wrong(loss, "slope", f"gave {value_text(grad)}, and not as its logits {value_text(logits)}")
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


def _one_each(loss: Loss, member: str, values: Any, tokens: Tensor) -> Tensor:
    """What a method gives, if it is a number for each of the tokens."""
    if not isinstance(values, Tensor) or values.shape != tokens.shape:
        needs = f"a Tensor of shape {list(tokens.shape)}, a number for each token"
        raise wrong(loss, member, f"gave {value_text(values)}, and not {needs}")
    return values


def _sums(loss: Loss, sums: Any, lse: Tensor) -> list[Tensor]:
    """The sums of a loss, if they are as many as it says, for each token."""
    if not isinstance(sums, tuple | list) or len(sums) != loss.reduced:
        gave = f"{len(sums)} tensors" if isinstance(sums, tuple | list) else value_text(sums)
        raise wrong(loss, "sums", f"gave {gave}, and not a tuple of {loss.reduced}, as `reduced` says")
    return [_one_each(loss, "sums", one, lse) for one in sums]


def _statistics(loss: Loss, logits: Tensor, words: Words) -> tuple[Tensor, Sequence[Tensor]]:
    """For each row: the log-sum-exp, and the sums of the loss."""
    if not logits.shape[-1]:
        zeros = logits.new_zeros(words.column.shape, dtype=words.dtype)
        return zeros - torch.inf, [zeros] * loss.reduced
    return log_sum_exp_of(logits, words.dtype), loss.sums(logits, words)


def log_sum_exp_of(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each row, in `dtype`."""
    if logits.is_cuda and logits.dtype != dtype:
        from fivefold.model.triton_kernels import log_sum_exp  # Triton's import takes a second

        return log_sum_exp(logits)
    largest = logits.amax(-1).to(dtype)
    below = logits - largest[:, None] if logits.dtype == dtype else logits.to(dtype).sub_(largest[:, None])
    return largest + below.exp_().sum(-1).log()


def _slope(loss: Loss, logits: Tensor, lse: Tensor, sums: list[Tensor], words: Words) -> Tensor:
    """The gradient by the logits; a rank without words has none."""
    return loss.slope(logits, lse, sums, words) if logits.shape[-1] else logits


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
def _compile_kernels() -> tuple[Callable[..., Any], ...]:
    return compile_function(_statistics), compile_function(_slope), compile_function(_scaled)


def _scaled(x: Tensor, by: Tensor) -> Tensor:
    """x times a scalar, in place. PyTorch's own kernel of two dtypes takes four times as long."""
    return x.mul_(by)


# ---- loss -----------------------------------------------------------------------------------------------------------
# The unfused loss, for logits that exist. A sum: only the count of the whole global batch divides it.


def loss_sum(logits: Tensor, targets: Tensor, mask: Tensor, loss: Loss = PLAIN) -> Tensor:
    """Sum of the losses where `mask` is True, in at least float32. logits [B, S, V], the others [B, S]."""
    widened = logits.to(accum_dtype(logits.dtype)).flatten(0, 1)
    values = _one_each(loss, "plain", loss.plain(widened, targets.flatten()), targets.flatten())
    return values.masked_fill(~mask.flatten(), 0.0).sum()
