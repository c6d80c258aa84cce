"""Expert parallelism: the experts of a layer are dealt out over the ep axis, and tokens travel to them and back.

slices       which tokens a rank routes: without sp every tp rank has all tokens, and routes its slice of them
alltoall     counts first, then each token to the ranks of its experts, and what they said back
allgather    every rank gets all tokens, computes those of its experts, and the sum goes back: for few ranks

`dispatch_of` chooses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fivefold.layout.sharding import chunk
from fivefold.model.dispatch import (
    COMBINE,
    DISPATCH,
    Beside,
    Compute,
    Unpermute,
    LocalDispatch,
    Rearrange,
    Routing,
    Permute,
    places,
)
from fivefold.model.grouped import Groups, DeferWgrad, has_kernel
from fivefold.model.layers import accum_dtype
from fivefold.model.moe import ExpertLinear
from fivefold.model.recompute import is_recomputing, save_output
from fivefold.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, wait, waiting
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.parallel.wgrad import WeightGradQueue
from fivefold.spec.model import ModelSpec

# ---- slices ---------------------------------------------------------------------------------------------------------
# Which tokens a rank routes, and which experts it has.
#
# With sp the residual stream is divided over tp, and so are the tokens. Without it every tp rank has them all: each
# routes a slice, ragged where they do not divide, and what came of the slices is gathered. Nothing is computed, sent
# or counted tp times. The router's gradients are then summands over tp; experts belong to no tp rank.


class SlicedDispatch(LocalDispatch):
    def __init__(self, mesh: Mesh, wgrad_queue: WeightGradQueue | None):
        self.mesh, self.ep, self.tp, self.sequence = mesh, mesh.ep, mesh.tp, mesh.sequence
        self.returning = mesh.returning or mesh.ep  # what backward passes send, which may run beside forward ones
        self.slices = mesh.tp.size > 1 and not mesh.layout.sp
        self.wgrad_queue = later
        self.names: dict[nn.Module, str] = {}

    def adopt(self, model: nn.Module) -> None:
        """Of every expert's linear only this rank's experts."""
        for name, module in model.named_modules():
            if isinstance(module, ExpertLinear):
                self.names[module] = name
                for kind, whole in list(module.named_parameters(recurse=False)):
                    shape = whole.shape[0] // self.ep.size, *whole.shape[1:]
                    setattr(module, kind, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta")))

    def own_tokens(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return OwnSlice.apply(flat, self.tp) if self.slices else flat

    def all_tokens(self, y: Tensor, like: Tensor) -> Tensor:
        if self.slices:
            y = AllSlices.apply(y, like.shape[0] * like.shape[1], self.tp)
        return y.view_as(like)

    def rows(self, x: Tensor) -> Tensor:
        rows = super().rows(x)
        return rows[_slice(len(rows), self.tp)] if self.slices else rows

    @contextmanager
    def sending(self, what: str) -> Iterator[None]:
        """Around a dispatch or a combine, forward or backward: an error for want of a peer names those it can be."""
        with self.watch(what), waiting(what, self.mesh, self.ep):
            yield

    @property
    def going(self) -> Axis:
        """The ranks of ep, in the group of the pass that this is: forward, or computed again in a backward pass."""
        return self.returning if is_recomputing() else self.ep

    def over_sequence(self, counts: Tensor) -> Tensor:
        (total,) = save_output(lambda: (wait(all_reduce(counts, self.sequence), self.sequence),), 1, counts)
        return total

    def defer_wgrad(self, linear: nn.Module) -> Callable[[], DeferWgrad | None] | None:
        return None if self.wgrad_queue is None else partial(self._put_off, linear)

    def _put_off(self, linear: nn.Module) -> DeferWgrad | None:
        """While the queue collects."""
        wgrad_queue = self.later
        if wgrad_queue is None or (works := wgrad_queue.open) is None:
            return None
        name, report = f"{self.names[linear]}.weight", wgrad_queue.report
        assert report is not None

        def leave(compute: Callable[[], Tensor]) -> None:
            @torch.no_grad()
            def work() -> None:
                report(name, compute())

            works.append(work)

        return leave


def _slice(tokens: int, axis: Axis) -> slice:
    mine = chunk(tokens, axis.size, axis.rank)
    return slice(mine.start, mine.stop)


class OwnSlice(Function):
    """[n, E], the same on all ranks -> this rank's slice. Backward gathers: each has the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.tokens, ctx.axis = x.shape[0], axis
        return x[_slice(x.shape[0], axis)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _gathered(gradient, ctx.tokens, ctx.axis), None


class AllSlices(Function):
    """This rank's slice -> [n, E], the same on all ranks. So is its gradient, of which backward takes the slice."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: int, axis: Axis) -> Tensor:
        ctx.tokens, ctx.axis = tokens, axis
        (whole,) = save_output(lambda: (_gathered(y, tokens, axis),), 1, y)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient[_slice(ctx.tokens, ctx.axis)].contiguous(), None, None


def _gathered(x: Tensor, tokens: int, axis: Axis) -> Tensor:
    """Slices in rank order; the last ones are padded on the way."""
    missing = len(chunk(tokens, axis.size, 0)) - x.shape[0]
    return wait(all_gather(F.pad(x, (0, 0, 0, missing)), axis), axis)[:tokens]


# ---- exchanges ------------------------------------------------------------------------------------------------------
# A message of experts in two steps, sent off and waited for, so that something else can run in between.
#
#     exchange = AsyncExchange(dispatch, DISPATCH, there, back)
#     ticket = StartExchange.apply(exchange, x)  forward starts there(x); backward waits for the gradient
#     ...                                     runs while the message travels, and so does its backward pass
#     exchange.pause()                        the other half of a joined pair runs, where there is one
#     (y,) = FinishExchange.apply(exchange, 1, ticket)  forward waits for it; backward starts back(gradient)
#
# Autograd runs what is ready in the reverse order of its making. So the backward pass of what was computed in between
# comes when the gradient has been sent off, and before it is waited for. Selective recompute keeps what has arrived,
# and sends nothing again.


Tensors = tuple[Tensor, ...]
Send = Callable[[Tensors, Axis], Tensors]  # starts to send them: what will come of them, and must be waited for


class AsyncExchange:
    """`there` and `back` start the collectives of the forward and the backward pass."""

    def __init__(self, by: SlicedDispatch, what: str, there: Send, back: Send):
        self.by, self.what, self.there, self.back = by, what, there, back
        self.flying: tuple[Tensor, ...] = ()
        self.sent: tuple[Tensor, ...] = ()  # they must stay as they are until they have gone
        self.axis: Axis | None = None

    def leave(self, how: Send, axis: Axis, tensors: tuple[Tensor, ...]) -> tuple[()]:
        self.sent, self.axis, self.flying = tensors, axis, how(tensors, axis)
        return ()

    def pause(self) -> None:
        """Before the wait: let the other half of a pair run. Where the store has what came, nothing is waited for."""
        if self.flying:
            self.by.yield_turn()

    def end(self) -> tuple[Tensor, ...]:
        """What has come."""
        assert self.axis is not None
        come = tuple(wait(one, self.axis) for one in self.flying)
        self.sent = self.flying = ()
        return come


class StartExchange(Function):
    """Tensors -> a ticket, which has no numbers; it ties the wait to this."""

    @staticmethod
    def forward(ctx: Any, trip: AsyncExchange, *tensors: Tensor) -> Tensor:
        ctx.trip, ctx.dtypes = trip, [tensor.dtype for tensor in tensors]
        save_output(lambda: trip.leave(trip.there, trip.by.going, tensors), 0, tensors[0])
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        trip: AsyncExchange = ctx.trip
        trip.pause()
        with trip.by.sending(trip.what):
            return None, *(one.to(dtype) for one, dtype in zip(trip.end(), ctx.dtypes, strict=True))


class FinishExchange(Function):
    """A ticket -> what has come, as many tensors as were sent off."""

    @staticmethod
    def forward(ctx: Any, trip: AsyncExchange, count: int, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        return save_output(trip.end, count, ticket)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        trip: AsyncExchange = ctx.trip
        with trip.by.sending(trip.what):
            trip.leave(trip.back, trip.by.returning, gradients)
        return None, None, gradients[0].new_empty(0)


# ---- allgather ------------------------------------------------------------------------------------------------------
# Tokens to their experts by all-gather: every ep rank gets all tokens, and computes those of its own experts.
#
# Per layer and microbatch, with at most n tokens on a rank, K slots each, over N ranks:
#
#     forward     all-gathers of N n (E + K) elements and N n K int64, a reduce-scatter of N n E in the accumulate dtype
#     backward    reduce-scatters of N n E and N n K elements, an all-gather of N n E, all in the accumulate dtype
#
# It sends N/K times what an all-to-all does or more, in fewer and larger messages, and how much does not depend on the
# routing: worth it where ep is about as small as K. What experts said is added up on the way back, rank by rank.


class AllGatherDispatch(SlicedDispatch):
    travels = True

    def run(
        self, x: Tensor, routing: Routing, compute: Compute, stream: int, beside: Beside = None
    ) -> tuple[Tensor, Tensor | None]:
        experts, own, most = routing.scores.shape[1], x.shape[0], self._most(stream)
        with self.sending(DISPATCH):
            there, choices = AsyncExchange(self, DISPATCH, _gather, _sum), AsyncExchange(self, DISPATCH, _gather, _sum)
            ticket = StartExchange.apply(there, _padded(x, most), _padded(routing.weights, most))
            choice = StartExchange.apply(choices, _padded(routing.chosen, most, -1))
        shared = beside() if beside is not None else None
        there.pause()
        with self.sending(DISPATCH):
            tokens, weights = FinishExchange.apply(there, 2, ticket)
            (chosen,) = FinishExchange.apply(choices, 1, choice)
            here = experts // self.ep.size
            mine = chosen - self.ep.rank * here
            # The slots of this rank's experts, in their order and then the tokens'; all others lie behind.
            of_expert = mine.where((mine >= 0) & (mine < here) & (chosen >= 0), here).flatten()
            counts = torch.bincount(of_expert, minlength=here + 1)[:here]
            sizes = tuple(self.host.by_expert(counts, routing.chosen.numel()))
            groups = Groups(counts.cumsum(0).int(), sizes)
            order = of_expert.sort(dim=0, stable=True).indices[: sum(sizes)].clone()
            rows = order // chosen.shape[1]
            theirs = tokens[rows]
        made = compute(theirs, groups)
        with self.sending(COMBINE):
            said = made.to(accum_dtype(x.dtype)) * weights.flatten()[order][:, None]
            sums = said.new_zeros(tokens.shape).index_add(0, rows, said)
            home = AsyncExchange(self, COMBINE, _sum, _gather)
            ticket = StartExchange.apply(home, sums)
        home.pause()
        with self.sending(COMBINE):
            (total,) = FinishExchange.apply(home, 1, ticket)
            return total[:own].to(x.dtype), shared

    def _most(self, stream: int) -> int:
        """Of `stream` tokens those of the rank that routes most."""
        return len(chunk(stream, self.tp.size, 0)) if self.slices else stream


def _padded(x: Tensor, rows: int, value: int = 0) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0]), value=value)


def _gather(tensors: Tensors, axis: Axis) -> Tensors:
    """[n, ...] of every rank -> [N n, ...], of each tensor."""
    return tuple(all_gather(tensor, axis) for tensor in tensors)


def _sum(tensors: Tensors, axis: Axis) -> Tensors:
    """[N n, ...] summands -> [n, ...]: the sum of this rank's part, in the accumulate dtype."""
    return tuple(reduce_scatter(tensor.to(accum_dtype(tensor.dtype)), axis) for tensor in tensors)


# ---- alltoall -------------------------------------------------------------------------------------------------------
# Tokens to their experts by all-to-all: how many first, then the tokens, and back.
#
# Per layer and microbatch, with n tokens on this rank, K slots each, N rows for this rank's experts, X experts in all:
#
#     forward     X int64 counts; n K rows of E elements out and N in; N out and n K in
#     backward    the two of rows again, the other way around
#
# A row is sent once for each slot, to whichever rank has the expert. Full recompute sends forward's again; selective
# recompute keeps what came. A rank without tokens, or whose experts got none, takes part like any other. While tokens
# are on their way to experts the shared one computes; and before each wait for rows, forward and backward, the other
# half of a joined pair may run.


class AllToAllDispatch(SlicedDispatch):
    travels = True
    reads_rows = False  # but where they have come back

    def run(
        self, x: Tensor, routing: Routing, compute: Compute, stream: int, beside: Beside = None
    ) -> tuple[Tensor, Tensor | None]:
        with self.sending(DISPATCH):
            order, counts, going = routing.order, routing.counts, self.going
            of_slot = places(order)
            (coming,) = save_output(lambda: (wait(all_to_all(counts, going), going),), 1, counts)
            sent, due = self.host.by_rank(counts, coming, self.ep.size, len(order))
            out, back = [sum(rank) for rank in sent], [sum(rank) for rank in due]
            there = self._trip(DISPATCH, out, back)
            ticket = StartExchange.apply(there, Permute.apply(x, order, of_slot))
            # They will lie rank by rank, and the experts want them expert by expert.
            by_expert = _experts_of(coming, self.ep.size, sum(back)).sort(dim=0, stable=True).indices
            ends = (
                coming.unflatten(0, (self.ep.size, -1)).sum(0).cumsum(0).int()
            )  # there, so that the host need not wait
            of_row, groups = places(by_expert), Groups(ends, tuple(map(sum, zip(*due, strict=True))))
        shared = beside() if beside is not None else None
        there.pause()
        with self.sending(DISPATCH):
            # One name for what moves on: what a name held before is let go of, and rows are large.
            (rows,) = FinishExchange.apply(there, 1, ticket)
            rows = Rearrange.apply(rows, by_expert, of_row)
        rows = compute(rows, groups)
        with self.sending(COMBINE):
            rows = Rearrange.apply(rows, of_row, by_expert)
            home = self._trip(COMBINE, back, out)
            ticket = StartExchange.apply(home, rows)
            del rows
        home.pause()
        with self.sending(COMBINE):
            (rows,) = FinishExchange.apply(home, 1, ticket)
            return Unpermute.apply(rows, routing.weights, order, of_slot), shared

    def _trip(self, what: str, out: list[int], back: list[int]) -> AsyncExchange:
        """Of rows [sum of `out`, E] -> [sum of `back`, E]: so many to each rank, and so many from each."""

        def there(rows: Tensors, axis: Axis) -> Tensors:
            return (all_to_all(rows[0], axis, out, back),)

        def home(gradients: Tensors, axis: Axis) -> Tensors:
            return (all_to_all(gradients[0], axis, back, out),)

        return AsyncExchange(self, what, there, home)


def _experts_of(coming: Tensor, ranks: int, rows: int) -> Tensor:
    """Which of this rank's experts each row is for; `coming` [ranks * experts here] are the numbers of these rows."""
    experts = torch.arange(len(coming) // ranks, device=coming.device).repeat(ranks)
    return experts.repeat_interleave(coming, output_size=rows)


# ---- experts --------------------------------------------------------------------------------------------------------


def dispatch_of(
    spec: ModelSpec, mesh: Mesh, wgrad_queue: WeightGradQueue | None = None, dtype: torch.dtype | None = None
) -> LocalDispatch:
    """How tokens reach the experts of a layout. With `later`, experts can put off the gradients of their weights;
    `dtype` is that of the tokens."""
    if spec.experts is None:
        return LocalDispatch()
    if mesh.ep.size == 1:  # every rank has all experts: nothing travels
        found = SlicedDispatch(mesh, wgrad_queue)
        # Nobody on the host asks how many tokens an expert has; what is put off leaves a graph, and PyTorch's compiler
        # knows the kernel of bfloat16 alone.
        widths, narrow = (spec.hidden, spec.experts.ffn), dtype == torch.bfloat16
        found.in_graph = wgrad_queue is None and narrow and has_kernel(mesh.device.type, torch.bfloat16, *widths)
        return found
    return (AllGatherDispatch if mesh.layout.dispatch == "allgather" else AllToAllDispatch)(mesh, wgrad_queue)
