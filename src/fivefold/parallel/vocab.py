"""The vocabulary over tp: every rank has a range of the words, as rows of the embedding and of the head.

The embedding's lookups are summed over the ranks. Head and loss are the model's `linear_cross_entropy`: `VocabParallel`
says how its scalars are combined over the ranks, so logits are never gathered (Megatron-LM, arXiv 1909.08053).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fivefold.layout.sharding import chunk
from fivefold.model.linear_cross_entropy import Vocabulary
from fivefold.parallel.collectives import all_reduce, all_reduce_or_scatter, gather_sequence, scatter_sequence, wait
from fivefold.parallel.mesh import Axis


def embed_in_shards(weight: Tensor, vocabulary: range, tokens: Tensor, axis: Axis, sp: bool) -> Tensor:
    """The embeddings of tokens: each rank looks up those of its `vocabulary` in its rows, the others add nothing."""
    rows = tokens - vocabulary.start
    elsewhere = (rows < 0) | (rows >= len(vocabulary))
    if not len(vocabulary):  # fewer words than ranks: a row of zeros for lookups on a rank without words
        weight = F.pad(weight, (0, 0, 0, 1))
    partial = F.embedding(rows.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0.0)
    return ReduceFn.apply(axis, sp, partial)


class ReduceFn(Function):
    """The sum over ranks, of the full sequence or (sp) of this rank's part."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, sp: bool, x: Tensor) -> Tensor:
        ctx.axis, ctx.sp = axis, sp
        return all_reduce_or_scatter(axis, sp, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, gather_sequence(gradient, ctx.axis) if ctx.sp else gradient


class VocabParallel(Vocabulary):
    """A vocabulary sharded over tp: every rank has the logits of its words, which are never gathered."""

    def __init__(self, size: int, axis: Axis, sp: bool):
        super().__init__(size)
        self.axis, self.sp = axis, sp
        self.local, self.largest = chunk(size, axis.size, axis.rank), len(chunk(size, axis.size, 0))

    def gather(self, x: Tensor) -> Tensor:
        return gather_sequence(x, self.axis) if self.sp else x

    def combine(self, lse: Tensor, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        largest = wait(all_reduce(lse, self.axis, "max"), self.axis)
        exp_sum, *sums = wait(all_reduce(torch.stack([(lse - largest).exp(), *sums]), self.axis), self.axis)
        return largest + exp_sum.log(), sums

    def start_reduce(self, dx: Tensor) -> Tensor:
        return scatter_sequence(dx, self.axis) if self.sp else all_reduce(dx, self.axis)

    def finish_reduce(self, dx: Tensor) -> Tensor:
        return wait(dx, self.axis)
