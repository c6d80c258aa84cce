"""Dispatch: tokens in the order of their experts, and what the experts said of them, weighted and added up.

This is one device's; `parallel/experts.py` has the same across ranks. Nothing is dropped: what would not fit depends on
who asks, and so on the layout.
Shapes: n tokens, E hidden, X experts, K of them for each token; a token has K slots.
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
from fivefold.model.grouped import GroupedLinear, Groups, DeferWgrad, added
from fivefold.model.layers import accum_dtype
from fivefold.model.recompute import unread
from fivefold.spec.blocks import Experts
from fivefold.spec.model import ModelSpec

# ---- host -----------------------------------------------------------------------------------------------------------
# How many rows go where, as the host must know them: to cut messages, and to make room for what comes.
#
# The host waits for the device here, once for a dispatch. A dry run, whose tensors have no numbers, states them
# instead (`dry/fake.py`).


class Host:
    def groups(self, ends: Tensor, slots: int) -> Groups:
        """Of `slots` rows that stay on this rank, where those of each expert end: only the device need know."""
        return Groups(ends)

    def by_expert(self, counts: Tensor, slots: int) -> list[int]:
        """Rows of each of this rank's experts; `slots` are those that this rank itself fills."""
        return timed_wait(counts.tolist)

    def by_rank(self, going: Tensor, coming: Tensor, ranks: int, slots: int) -> tuple[list[list[int]], list[list[int]]]:
        """Rows that go to each rank and expert there, and those that come from each, for every expert here."""
        out, back = timed_wait(torch.stack((going, coming)).unflatten(1, (ranks, -1)).tolist)  # both at once
        return out, back


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
    order: Tensor  # [n * K] the slots in the order of their experts, then of the tokens
    ends: Tensor  # int32 [X] where in this order those of each expert end

    @property
    def counts(self) -> Tensor:
        """[X] slots that each expert has."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).to(torch.int64)


class Router(nn.Module):
    """One linear, and the choice of the best. `balance` helps to choose and does not weigh; see `balance.py`."""

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
        kind = accum_dtype(x.dtype)
        logits = F.linear(x.to(kind), weight.to(kind), None if bias is None else bias.to(kind))
        scores = logits.softmax(-1) if self.experts.scores == "softmax" else logits.sigmoid()
        chosen = self.best(scores) if self.choose is None else self.choose(scores)
        weights = scores.gather(1, chosen)
        if self.experts.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(kind).tiny)
        return Routing(chosen, weights * self.experts.scale, scores, logits, *in_order(chosen, self.experts.count))

    def count(self, counts: Tensor) -> None:
        """Of a microbatch."""
        self.tokens_per_expert = counts if self.tokens_per_expert is None else self.tokens_per_expert + counts

    @torch.no_grad()
    def best(self, scores: Tensor) -> Tensor:
        """The numbers of the K best experts, [n, K], the best first."""
        wish = scores if self.balance is None else scores + self.balance
        return best(self.experts, wish)


@torch.no_grad()
def in_order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The slots in the order of their experts, and where each expert's end. The host need not know."""
    sorted_, order = chosen.flatten().to(torch.int32).sort(stable=True)
    every = torch.arange(experts, dtype=torch.int32, device=chosen.device)
    return order, torch.searchsorted(sorted_, every, right=True, out_int32=True)


def best(experts: Experts, wish: Tensor) -> Tensor:
    """The K best of [n, X], the first of equals; only among the best groups, where there are groups."""
    if experts.groups > 1:
        groups = wish.unflatten(-1, (experts.groups, -1))
        heads = groups.sort(dim=-1, descending=True).values[..., : experts.group_scores].sum(-1)
        out = heads.sort(dim=-1, descending=True, stable=True).indices[..., experts.top_groups :]
        closed = torch.zeros_like(heads, dtype=torch.bool).scatter_(-1, out, True)
        wish = groups.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    return wish.sort(dim=-1, descending=True, stable=True).indices[..., : experts.top_k].clone()


# ---- dispatch -------------------------------------------------------------------------------------------------------


Compute = Callable[[Tensor, Groups], Tensor]  # what the experts make of rows that lie expert by expert
Beside = Callable[[], Tensor] | None  # what can be computed while tokens travel: the expert that all of them visit


Watch = Callable[[str], AbstractContextManager[None]]
DISPATCH, COMBINE = "dispatch", "combine"  # tokens on their way to experts, and what came of them on its way back


class LocalDispatch:
    in_graph = False  # whether a compiled block may have it inside
    fp8 = False  # whether experts multiply 8-bit floats
    watch: Watch = staticmethod(lambda name: nullcontext())  # surrounds the two
    host = Host()
    travels = False  # whether tokens go to other ranks
    reads_rows = True  # whether a backward pass reads what the experts here said
    yield_turn: Callable[[], None] = staticmethod(lambda: None)  # called before a wait: something else may run

    def adopt(self, model: nn.Module) -> None:
        """Meet the model, on the meta device: ranks that share its experts take theirs here."""

    def own_tokens(self, x: Tensor) -> Tensor:
        """Of the residual stream [B, S, E] the tokens that this rank routes, [n, E]."""
        return x.flatten(0, 1)

    def all_tokens(self, y: Tensor, like: Tensor) -> Tensor:
        """What came of them, [n, E], as the residual stream."""
        return y.view_as(like)

    def rows(self, x: Tensor) -> Tensor:
        """The row of the batch that each of these tokens stands in, [n]."""
        return torch.arange(x.shape[0], device=x.device).repeat_interleave(x.shape[1])

    def over_sequence(self, counts: Tensor) -> Tensor:
        """Numbers of rows, summed over the ranks that share these rows."""
        return counts

    def run(
        self, x: Tensor, routing: Routing, compute: Compute, stream: int, beside: Beside = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [n, E] -> [n, E], and what `beside` gives; `stream`: how many tokens the residual stream has here."""
        with self.watching(DISPATCH):
            order, back = routing.order, places(routing.order)
            rows = Permute.apply(x, order, back)
        rows = compute(rows, self.host.groups(routing.ends, len(order)))
        with self.watching(COMBINE):
            y = Unpermute.apply(rows, routing.weights, order, back)
        return y, beside() if beside is not None else None

    def watching(self, what: str) -> AbstractContextManager[None]:
        """A graph has no time of its parts."""
        return nullcontext() if torch.compiler.is_compiling() else self.watch(what)

    def linear(self, x: Tensor, linear: Any, groups: Groups, last: bool = False) -> Tensor:
        """A linear of every expert, on the rows of each; the last one gives what the experts say."""
        product = Fp8GroupedLinear if self.fp8 else GroupedLinear

        def compute() -> Tensor:
            return product.apply(x, linear.weight, groups.ends, groups.sizes, self.defer_wgrad(linear))

        if self.reads_rows or not last:
            return added(compute(), linear.bias, groups)
        shape = x.shape[0], linear.weight.shape[0] // groups.ends.shape[0]
        return added(unread(compute, shape, x, linear.weight, groups.ends), linear.bias, groups)

    def defer_wgrad(self, linear: nn.Module) -> Callable[[], DeferWgrad | None] | None:
        """What is asked in a backward pass: where a function goes that computes the weight's gradient; nowhere."""
        return None


def places(order: Tensor) -> Tensor:
    """Where each slot went."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Rearrange(Function):
    """Rows in another order; `back` undoes it. Autograd's own way back would add rows to zeros, one at a time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient[ctx.saved_tensors[0]], None, None


class Permute(Function):
    """Tokens [n, E] -> the rows of their slots [n * K, E], in the order of the experts.

    Backward adds up each token's slots in their order, as it reads them: so the sum is the same every time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.shape, ctx.slots = x.shape, max(1, len(order) // max(1, x.shape[0]))
        return x[order // ctx.slots]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        back = ctx.saved_tensors[0].view(-1, ctx.slots)
        # A slot at a time: compiled, one kernel that reads whole rows.
        total = gradient.new_zeros(ctx.shape, dtype=accum_dtype(gradient.dtype))
        for slot in back.unbind(1):
            total = total + gradient[slot]
        return total.to(gradient.dtype), None, None


class Unpermute(Function):
    """What the experts said in each slot, [n * K, E] in their order, weighted and added up: [n, E]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, back)
        total = weights.new_zeros(weights.shape[0], rows.shape[1])
        for slot, weight in zip(back.view(weights.shape).unbind(1), weights.unbind(1), strict=True):
            total = total + rows[slot] * weight[:, None]
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        rows, weights, order, back = ctx.saved_tensors
        dy = gradient[order // weights.shape[1]].to(weights.dtype)
        for_weights = (dy * rows).sum(-1)[back].view(weights.shape)
        return dy.mul_(weights.flatten()[order][:, None]).to(rows.dtype), for_weights, None, None
