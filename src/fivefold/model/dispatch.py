"""Dispatch: tokens are permuted into the order of their experts, and the experts' outputs weighted and added up.

This is one device's; `parallel/experts.py` has the same across ranks. No token is dropped: which would not fit depends
on the other tokens of a rank, and so on the layout.
Shapes: n tokens, E hidden, X experts, K of them for each token: n * K assignments.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fivefold.launch.waits import timed_wait
from fivefold.model.fp8 import Fp8GroupedLinear
from fivefold.model.grouped import DeferWgrad, GroupedLinear, Groups, add_bias
from fivefold.model.layers import accum_dtype
from fivefold.model.recompute import not_saved
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec

# ---- host -----------------------------------------------------------------------------------------------------------
# How many rows go where, as the host must know them: to cut messages, and to make room for what comes.
#
# The host waits for the device here, once for a dispatch. A dry run, whose tensors have no numbers, states them
# instead (`dry/fake.py`).


class Host:
    def groups(self, ends: Tensor, assignments: int) -> Groups:
        """Of the rows that stay on this rank, where those of each expert end: only the device need know."""
        return Groups(ends)

    def by_expert(self, counts: Tensor, assignments: int) -> list[int]:
        """Rows of each of this rank's experts; `assignments` are those of this rank's own tokens."""
        return timed_wait(counts.tolist)

    def by_rank(
        self, counts_out: Tensor, counts_in: Tensor, ranks: int, assignments: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Rows that go to each rank and expert there, and those that come from each, for every expert here."""
        both = torch.stack((counts_out, counts_in)).unflatten(1, (ranks, -1))
        sizes_out, sizes_in = timed_wait(both.tolist)  # in one wait
        return sizes_out, sizes_in


# ---- router ---------------------------------------------------------------------------------------------------------
# The router: which experts a token visits, and how much each of them counts.
#
# Scores are at least float32, and equal scores are decided by the expert's number: no layout may send a token
# elsewhere. Shapes: n tokens, E hidden, X experts, K of them for each token.


@dataclass(frozen=True)
class Routing:
    """Where tokens go."""

    chosen: Tensor  # [n, K] numbers of experts, the best first
    weights: Tensor  # [n, K] what each of them counts
    scores: Tensor  # [n, X] of all experts
    logits: Tensor  # [n, X] before they became scores
    order: Tensor  # [n * K] the assignments in the order of their experts, then of the tokens
    ends: Tensor  # int32 [X] where in this order those of each expert end

    @property
    def counts(self) -> Tensor:
        """[X] assignments that each expert has."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).to(torch.int64)


class Router(nn.Module):
    """One linear, and the choice of the top K. The bias `balance` counts for the choice and not for the weights; see
    `moe.py`."""

    balance: Tensor | None

    def __init__(self, spec: ModelSpec):
        super().__init__()
        assert spec.experts is not None
        self.experts = spec.experts
        self.weight = nn.Parameter(torch.empty(self.experts.count, spec.hidden))
        self.bias = nn.Parameter(torch.empty(self.experts.count)) if spec.bias else None
        balance = torch.zeros(self.experts.count) if self.experts.balance_bias else None
        self.register_buffer("balance", balance, persistent=False)
        self.tokens_per_expert: Tensor | None = None  # [X] tokens that each expert got since the step began
        # A proof looks at what is chosen, and may choose itself: see `verifier/rank.py`.
        self.choose: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Routing:
        """x [n, E]; the parameters are given, because ranks may share them."""
        dtype = accum_dtype(x.dtype)
        logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        scores = logits.softmax(-1) if self.experts.scores == "softmax" else logits.sigmoid()
        chosen = self.best(scores) if self.choose is None else self.choose(scores)
        weights = scores.gather(1, chosen)
        if self.experts.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(dtype).tiny)
        return Routing(chosen, weights * self.experts.scale, scores, logits, *in_order(chosen, self.experts.count))

    def count(self, counts: Tensor) -> None:
        """Of a microbatch."""
        self.tokens_per_expert = counts if self.tokens_per_expert is None else self.tokens_per_expert + counts

    @torch.no_grad()
    def best(self, scores: Tensor) -> Tensor:
        """The numbers of the K best experts, [n, K], the best first."""
        return best(self.experts, scores if self.balance is None else scores + self.balance)


@torch.no_grad()
def in_order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The assignments in the order of their experts, and where each expert's end. The host need not know."""
    sorted_, order = chosen.flatten().to(torch.int32).sort(stable=True)
    numbers = torch.arange(experts, dtype=torch.int32, device=chosen.device)
    return order, torch.searchsorted(sorted_, numbers, right=True, out_int32=True)


def best(experts: Experts, scores: Tensor) -> Tensor:
    """The K best of [n, X], the first of equals; only among the best groups, where there are groups."""
    if experts.groups > 1:
        groups = scores.unflatten(-1, (experts.groups, -1))
        group_scores = groups.sort(dim=-1, descending=True).values[..., : experts.group_scores].sum(-1)
        others = group_scores.sort(dim=-1, descending=True, stable=True).indices[..., experts.top_groups :]
        excluded = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, others, True)
        scores = groups.masked_fill(excluded[..., None], -torch.inf).flatten(-2)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., : experts.top_k].clone()


# ---- dispatch -------------------------------------------------------------------------------------------------------


ExpertsFn = Callable[[Tensor, Groups], Tensor]  # what the experts make of rows that lie expert by expert
SharedExpert = Callable[[], Tensor] | None  # the output of the expert that all tokens visit, computed while they travel


Watch = Callable[[str], AbstractContextManager[None]]
DISPATCH, COMBINE = "dispatch", "combine"  # tokens on their way to experts, and their outputs on the way back


class LocalDispatch:
    in_graph = False  # whether a compiled block may have it inside
    fp8 = False  # whether experts multiply 8-bit floats
    watch: Watch = staticmethod(lambda name: nullcontext())  # surrounds the two
    host = Host()
    sends_tokens = False  # whether tokens go to other ranks
    reads_rows = True  # whether a backward pass reads the outputs of the experts here
    yield_turn: Callable[[], None] = staticmethod(lambda: None)  # called before a wait: something else may run

    def adopt(self, model: nn.Module) -> None:
        """Meet the model, on the meta device: ranks that share its experts take theirs here."""

    def own_tokens(self, x: Tensor) -> Tensor:
        """Of the residual stream [B, S, E] the tokens that this rank routes, [n, E]."""
        return x.flatten(0, 1)

    def all_tokens(self, y: Tensor, like: Tensor) -> Tensor:
        """The outputs of these tokens, [n, E], as the residual stream."""
        return y.view_as(like)

    def rows(self, x: Tensor) -> Tensor:
        """The row of the batch that each of these tokens stands in, [n]."""
        return torch.arange(x.shape[0], device=x.device).repeat_interleave(x.shape[1])

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        """Numbers of rows, summed over the ranks that share these rows."""
        return counts

    def run(
        self, x: Tensor, routing: Routing, experts: ExpertsFn, stream: int, shared: SharedExpert = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [n, E] -> [n, E], and the `shared` expert's output; `stream`: tokens of the residual stream here."""
        with self.watching(DISPATCH):
            order, row_of = routing.order, inverse(routing.order)
            rows = Permute.apply(x, order, row_of)
        rows = experts(rows, self.host.groups(routing.ends, len(order)))
        with self.watching(COMBINE):
            y = Unpermute.apply(rows, routing.weights, order, row_of)
        return y, shared() if shared is not None else None

    def watching(self, what: str) -> AbstractContextManager[None]:
        """`watch`, but not inside of a graph, whose parts have no times."""
        return nullcontext() if torch.compiler.is_compiling() else self.watch(what)

    def linear(self, x: Tensor, linear: Any, groups: Groups, last: bool = False) -> Tensor:
        """A linear of every expert, on the rows of each; the last one makes the experts' outputs."""
        function = Fp8GroupedLinear if self.fp8 else GroupedLinear

        def compute() -> Tensor:
            return function.apply(x, linear.weight, groups.ends, groups.sizes, self.defer_wgrad(linear))

        if self.reads_rows or not last:
            return add_bias(compute(), linear.bias, groups)
        shape = x.shape[0], linear.weight.shape[0] // groups.ends.shape[0]
        return add_bias(not_saved(compute, shape, x, linear.weight, groups.ends), linear.bias, groups)

    def defer_wgrad(self, linear: nn.Module) -> Callable[[], DeferWgrad | None] | None:
        """A backward pass calls what this returns, to learn where to leave a function that computes the weight's
        gradient. Here nothing is deferred."""
        return None


def inverse(order: Tensor) -> Tensor:
    """The inverse permutation: where each assignment went."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Rearrange(Function):
    """Rows in another order, which `inverse` undoes. Autograd's own backward would add rows to zeros, one at a time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient[ctx.saved_tensors[0]], None, None


class Permute(Function):
    """Tokens [n, E] -> a row for each of their assignments [n * K, E], in the order of the experts.

    Backward adds up each token's K rows, the best expert's first: so the sum is the same every time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(row_of)
        ctx.shape, ctx.top_k = x.shape, max(1, len(order) // max(1, x.shape[0]))
        return x[order // ctx.top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        row_of = ctx.saved_tensors[0].view(-1, ctx.top_k)
        # One of the K at a time: compiled, one kernel that reads whole rows.
        total = gradient.new_zeros(ctx.shape, dtype=accum_dtype(gradient.dtype))
        for rows in row_of.unbind(1):
            total = total + gradient[rows]
        return total.to(gradient.dtype), None, None


class Unpermute(Function):
    """The experts' outputs, [n * K, E] in the order of the experts, weighted and added up: [n, E]."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(outputs, weights, order, row_of)
        total = weights.new_zeros(weights.shape[0], outputs.shape[1])
        for rows, weight in zip(row_of.view(weights.shape).unbind(1), weights.unbind(1), strict=True):
            total = total + outputs[rows] * weight[:, None]
        return total.to(outputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        outputs, weights, order, row_of = ctx.saved_tensors
        dy = gradient[order // weights.shape[1]].to(weights.dtype)
        for_weights = (dy * outputs).sum(-1)[row_of].view(weights.shape)
        return dy.mul_(weights.flatten()[order][:, None]).to(outputs.dtype), for_weights, None, None
