"""Attention of whole rows on one process, and of shares on many, from the same numbers."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fivefold.data.batch import Batch
from fivefold.layout.layout import Layout
from fivefold.model.layers import TokenPositions
from fivefold.model.recompute import recomputed
from fivefold.parallel.context import ContextParallel
from fivefold.parallel.mesh import Mesh

# 16 tokens; the shares of 4 ranks in zigzag are pieces of 2, of 2 ranks pieces of 4.
DOCUMENTS = {
    "none": None,
    "one": [[0] * 16, [0] * 16],
    # a run that ends in each piece; one that begins in one shard and ends two later; and one-token documents
    "crossing": [[0] * 3 + [1] * 4 + [2] + [3] * 8, [0] + [1] * 9 + [2, 3, 4, 5] + [6] * 2],
    "apart": [[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4, list(range(16))],
}


@dataclass(frozen=True)
class Case:
    layout: Layout
    dtype: torch.dtype = torch.float64
    heads: int = 4
    kv_heads: int = 2
    documents: str = "crossing"
    seq: int = 16
    batch: int = 2
    dim: int = 6

    def whole(self) -> tuple[list[Tensor], Batch]:
        """q, k, v and the gradient of the output, of whole rows, and a batch."""
        torch.manual_seed(1)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        tensors = [torch.randn(self.batch, n, self.seq, self.dim, dtype=torch.float64).to(self.dtype) for n in heads]
        documents = DOCUMENTS[self.documents] or np.zeros((self.batch, self.seq))
        tokens = np.arange(self.batch * self.seq).reshape(self.batch, -1)
        rows = np.asarray(documents, np.int32)[: self.batch]
        return tensors, Batch(np.arange(self.batch), tokens, tokens + 1, tokens % 3 > 0, rows)

    def expected(self) -> list[Tensor]:
        """Output and gradients of q, k and v, by stock attention in float64."""
        tensors, batch = self.whole()
        q, k, v, grad = (x.double() for x in tensors)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        seen = torch.ones(self.seq, self.seq, dtype=torch.bool).tril()
        if DOCUMENTS[self.documents] is not None:
            rows = torch.from_numpy(batch.documents)
            seen = seen & (rows[:, None, :, None] == rows[:, None, None, :])
        out = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


class Rank:
    """One cp rank's tensors of a case."""

    def __init__(self, case: Case):
        mesh = Mesh.of(case.layout, torch.device("cpu"))
        self.mesh, self.context = mesh, ContextParallel(mesh)
        tensors, batch = case.whole()
        self.share = self.context.share(batch)
        self.places = self.share.positions[0]
        self.q, self.k, self.v, self.grad = (x[:, :, self.places].clone() for x in tensors)
        self.leaves = [x.requires_grad_() for x in (self.q, self.k, self.v)]
        place = TokenPositions(torch.from_numpy(self.share.positions), torch.from_numpy(batch.samples), case.seq)
        if DOCUMENTS[case.documents] is not None:
            place = self.share.with_documents(place)
        self.sight = self.context.attention_mask(place)

    def forward(self, recompute: str = "none") -> Tensor:
        run = recomputed(recompute) if recompute != "plain checkpoint" else partial(checkpoint, use_reentrant=False)
        one = torch.ones((), dtype=self.q.dtype, requires_grad=True)

        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """With something before it, and something after that keeps what attention returned."""
            return self.context.attend(q * one, k * one, v * one, self.sight) * one

        return run(block, *self.leaves)

    def backward(self, out: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(out, self.leaves, self.grad))


Part = tuple[np.ndarray, list[Tensor]]  # a rank's positions; its part of the output and of the gradients


def shares(rank: int, world: int, jobs: list[tuple[Case, str]]) -> list[Part]:
    parts = []
    for case, recompute in jobs:
        here = Rank(case)
        out = here.forward(recompute)
        parts.append((here.places, [out.detach(), *here.backward(out)]))
    return parts


def worst(parts: list[Part], expected: list[Tensor]) -> float:
    """The largest relative error of output and gradients; every position is to be held once."""
    places = np.concatenate([held for held, _ in parts])
    assert sorted(places) == list(range(expected[0].shape[2]))
    errors = []
    for pieces, want in zip(zip(*(tensors for _, tensors in parts), strict=True), expected, strict=True):
        got = torch.empty_like(want)
        got[:, :, places] = torch.cat([piece.double() for piece in pieces], dim=2)
        assert torch.isfinite(got).all()
        errors.append(((got - want).abs().max() / want.abs().max()).item())
    return max(errors)
