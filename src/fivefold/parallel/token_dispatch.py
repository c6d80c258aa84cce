"""Expert parallelism: the experts of a layer are dealt out over the ep axis, and tokens travel to them and back.

slices       which tokens a rank routes: without sp every tp rank has all tokens, and routes its slice of them
alltoall     counts first, then each token to the ranks of its experts, and their outputs back
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
    ExpertsFn,
    LocalDispatch,
    Permute,
    Rearrange,
    SharedExpert,
    Unpermute,
    inverse,
)
from fivefold.model.grouped import DeferWgrad, Groups, has_kernel
from fivefold.model.layers import accum_dtype
from fivefold.model.moe import ExpertLinear
from fivefold.model.recompute import is_recomputing, save_output
from fivefold.model.router import Routing
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
        self.mesh, self.ep, self.tp, self.sequence = mesh, mesh.ep, mesh.tp, mesh.cp_tp
        self.backward_ep = mesh.backward_ep or mesh.ep  # what backward passes send, which may run beside forward ones
        self.slices = mesh.tp.size > 1 and not mesh.layout.sp
        self.wgrad_queue = wgrad_queue
        self.names: dict[nn.Module, str] = {}

    def adopt(self, model: nn.Module) -> None:
        """Of every expert's linear only this rank's experts."""
        for name, module in model.named_modules():
            if isinstance(module, ExpertLinear):
                self.names[module] = name
                for kind, full in list(module.named_parameters(recurse=False)):
                    shape = full.shape[0] // self.ep.size, *full.shape[1:]
                    setattr(module, kind, nn.Parameter(torch.empty(shape, dtype=full.dtype, device="meta")))

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
    def current_ep(self) -> Axis:
        """The ranks of ep, in the group of the pass that this is: forward, or computed again in a backward pass."""
        return self.backward_ep if is_recomputing() else self.ep

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        (total,) = save_output(lambda: (wait(all_reduce(counts, self.sequence), self.sequence),), 1, counts)
        return total

    def defer_wgrad(self, linear: nn.Module) -> Callable[[], DeferWgrad | None] | None:
        return None if self.wgrad_queue is None else partial(self._defer, linear)

    def _defer(self, linear: nn.Module) -> DeferWgrad | None:
        """Where the gradient of this linear's weight is deferred to, while the queue collects."""
        queue = self.wgrad_queue
        if queue is None or (tasks := queue.tasks) is None:
            return None
        name, report = f"{self.names[linear]}.weight", queue.report
        assert report is not None

        def defer(compute: Callable[[], Tensor]) -> None:
            @torch.no_grad()
            def task() -> None:
                report(name, compute())

            tasks.append(task)

        return defer


def _slice(tokens: int, axis: Axis) -> slice:
    local = chunk(tokens, axis.size, axis.rank)
    return slice(local.start, local.stop)


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
        (gathered,) = save_output(lambda: (_gathered(y, tokens, axis),), 1, y)
        return gathered

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
#     exchange = AsyncExchange(dispatch, DISPATCH, forward, backward)
#     ticket = StartExchange.apply(exchange, x)          forward starts forward(x); backward waits for the gradient
#     ...                                                runs while the message travels, and so does its backward pass
#     exchange.pause()                                   the other half of an overlapped pair runs, where there is one
#     (y,) = FinishExchange.apply(exchange, 1, ticket)   forward waits for it; backward starts backward(gradient)
#
# Autograd runs what is ready in the reverse order of its making. So the backward pass of what was computed in between
# comes when the gradient has been sent off, and before it is waited for. Selective recompute keeps what has arrived,
# and sends nothing again.


Tensors = tuple[Tensor, ...]
Send = Callable[[Tensors, Axis], Tensors]  # starts to send them: what will come of them, and must be waited for


class AsyncExchange:
    """`forward` and `backward` start the collectives of these passes."""

    def __init__(self, dispatch: SlicedDispatch, what: str, forward: Send, backward: Send):
        self.dispatch, self.what, self.forward, self.backward = dispatch, what, forward, backward
        self.in_flight: Tensors = ()
        self.sent: Tensors = ()  # they must stay as they are until they have gone
        self.axis: Axis | None = None

    def start(self, send: Send, axis: Axis, tensors: Tensors) -> tuple[()]:
        self.sent, self.axis, self.in_flight = tensors, axis, send(tensors, axis)
        return ()

    def pause(self) -> None:
        """Before the wait: let the other half of a pair run. In a recomputation that takes what came from the store
        nothing is in flight."""
        if self.in_flight:
            self.dispatch.yield_turn()

    def finish(self) -> Tensors:
        """Wait for what comes."""
        assert self.axis is not None
        received = tuple(wait(tensor, self.axis) for tensor in self.in_flight)
        self.sent = self.in_flight = ()
        return received


class StartExchange(Function):
    """Tensors -> a ticket, which has no numbers; it ties the wait to this."""

    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *tensors: Tensor) -> Tensor:
        ctx.exchange, ctx.dtypes = exchange, [tensor.dtype for tensor in tensors]
        save_output(lambda: exchange.start(exchange.forward, exchange.dispatch.current_ep, tensors), 0, tensors[0])
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        exchange: AsyncExchange = ctx.exchange
        exchange.pause()
        with exchange.dispatch.sending(exchange.what):
            grads = exchange.finish()
            return None, *(grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True))


class FinishExchange(Function):
    """A ticket -> what has come, as many tensors as were sent off."""

    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, count: int, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return save_output(exchange.finish, count, ticket)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        exchange: AsyncExchange = ctx.exchange
        with exchange.dispatch.sending(exchange.what):
            exchange.start(exchange.backward, exchange.dispatch.backward_ep, gradients)
        return None, None, gradients[0].new_empty(0)


# ---- allgather ------------------------------------------------------------------------------------------------------
# Tokens to their experts by all-gather: every ep rank gets all tokens, and computes those of its own experts.
#
# Per layer and microbatch, with at most n tokens on a rank, K experts each, over N ranks:
#
#     forward     all-gathers of N n (E + K) elements and N n K int64, a reduce-scatter of N n E in the accumulate dtype
#     backward    reduce-scatters of N n E and N n K elements, an all-gather of N n E, all in the accumulate dtype
#
# It sends N/K times what an all-to-all does or more, in fewer and larger messages, and how much does not depend on the
# routing: worth it where ep is about as small as K. The experts' outputs are added up on the way back, rank by rank.


class AllGatherDispatch(SlicedDispatch):
    sends_tokens = True

    def run(
        self, x: Tensor, routing: Routing, experts: ExpertsFn, stream: int, shared: SharedExpert = None
    ) -> tuple[Tensor, Tensor | None]:
        tokens_here, most = x.shape[0], self._most(stream)
        with self.sending(DISPATCH):
            dispatch, choices = (AsyncExchange(self, DISPATCH, _gather, _sum) for _ in range(2))
            ticket = StartExchange.apply(dispatch, _padded(x, most), _padded(routing.weights, most))
            choice_ticket = StartExchange.apply(choices, _padded(routing.chosen, most, -1))
        shared_output = shared() if shared is not None else None
        dispatch.pause()
        with self.sending(DISPATCH):
            tokens, weights = FinishExchange.apply(dispatch, 2, ticket)
            (chosen,) = FinishExchange.apply(choices, 1, choice_ticket)
            local_experts = routing.scores.shape[1] // self.ep.size
            number = chosen - self.ep.rank * local_experts  # of the expert, among those of this rank
            # The assignments to this rank's experts, in their order and then the tokens'; all others lie behind.
            is_local = (number >= 0) & (number < local_experts) & (chosen >= 0)
            of_expert = number.where(is_local, local_experts).flatten()
            counts = torch.bincount(of_expert, minlength=local_experts + 1)[:local_experts]
            sizes = tuple(self.host.by_expert(counts, routing.chosen.numel()))
            groups = Groups(counts.cumsum(0).int(), sizes)
            order = of_expert.sort(dim=0, stable=True).indices[: sum(sizes)].clone()
            token_of = order // chosen.shape[1]
            rows = tokens[token_of]
        outputs = experts(rows, groups)
        with self.sending(COMBINE):
            weighted = outputs.to(accum_dtype(x.dtype)) * weights.flatten()[order][:, None]
            sums = weighted.new_zeros(tokens.shape).index_add(0, token_of, weighted)
            combine = AsyncExchange(self, COMBINE, _sum, _gather)
            ticket = StartExchange.apply(combine, sums)
        combine.pause()
        with self.sending(COMBINE):
            (total,) = FinishExchange.apply(combine, 1, ticket)
            return total[:tokens_here].to(x.dtype), shared_output

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
# Per layer and microbatch, with n tokens on this rank, K of X experts each, and N rows for this rank's experts:
#
#     forward     X int64 counts; n K rows of E elements out and N in; N out and n K in
#     backward    the two of rows again, the other way around
#
# A row is sent once for each assignment, to whichever rank has the expert. Full recompute sends forward's again;
# selective recompute keeps what came. A rank without tokens, or whose experts got none, takes part like any other.
# While tokens are on their way to experts the shared one computes; and before each wait for rows, forward and backward,
# the other half of an overlapped pair may run.


class AllToAllDispatch(SlicedDispatch):
    sends_tokens = True
    reads_rows = False  # but where they have come back

    def run(
        self, x: Tensor, routing: Routing, experts: ExpertsFn, stream: int, shared: SharedExpert = None
    ) -> tuple[Tensor, Tensor | None]:
        with self.sending(DISPATCH):
            order, counts, ep = routing.order, routing.counts, self.current_ep
            row_of = inverse(order)
            (counts_in,) = save_output(lambda: (wait(all_to_all(counts, ep), ep),), 1, counts)
            sizes_out, sizes_in = self.host.by_rank(counts, counts_in, self.ep.size, len(order))
            sent, received = [sum(sizes) for sizes in sizes_out], [sum(sizes) for sizes in sizes_in]
            dispatch = self._exchange(DISPATCH, sent, received)
            ticket = StartExchange.apply(dispatch, Permute.apply(x, order, row_of))
            # The rows come rank by rank, and the experts want them expert by expert.
            by_expert = _experts_of(counts_in, self.ep.size, sum(received)).sort(dim=0, stable=True).indices
            by_rank = inverse(by_expert)
            ends = counts_in.unflatten(0, (self.ep.size, -1)).sum(0).cumsum(0).int()  # on the device: no wait for it
            groups = Groups(ends, tuple(map(sum, zip(*sizes_in, strict=True))))
        shared_output = shared() if shared is not None else None
        dispatch.pause()
        with self.sending(DISPATCH):
            # One name for what moves on: what a name held before is let go of, and rows are large.
            (rows,) = FinishExchange.apply(dispatch, 1, ticket)
            rows = Rearrange.apply(rows, by_expert, by_rank)
        rows = experts(rows, groups)
        with self.sending(COMBINE):
            rows = Rearrange.apply(rows, by_rank, by_expert)
            combine = self._exchange(COMBINE, received, sent)
            ticket = StartExchange.apply(combine, rows)
            del rows
        combine.pause()
        with self.sending(COMBINE):
            (rows,) = FinishExchange.apply(combine, 1, ticket)
            return Unpermute.apply(rows, routing.weights, order, row_of), shared_output

    def _exchange(self, what: str, sent: list[int], received: list[int]) -> AsyncExchange:
        """Of rows [sum of `sent`, E] -> [sum of `received`, E]: so many to each rank, and so many from each."""

        def forward(rows: Tensors, axis: Axis) -> Tensors:
            return (all_to_all(rows[0], axis, sent, received),)

        def backward(gradients: Tensors, axis: Axis) -> Tensors:
            return (all_to_all(gradients[0], axis, received, sent),)

        return AsyncExchange(self, what, forward, backward)


def _experts_of(counts: Tensor, ranks: int, rows: int) -> Tensor:
    """Which of this rank's experts each received row is for; `counts` [ranks * local experts] are numbers of rows."""
    experts = torch.arange(len(counts) // ranks, device=counts.device).repeat(ranks)
    return experts.repeat_interleave(counts, output_size=rows)


# ---- experts --------------------------------------------------------------------------------------------------------


def dispatch_of(
    spec: ModelSpec, mesh: Mesh, wgrad_queue: WeightGradQueue | None = None, dtype: torch.dtype | None = None
) -> LocalDispatch:
    """How tokens reach the experts of a layout. With `wgrad_queue`, experts can defer the gradients of their weights;
    `dtype` is that of the tokens."""
    if spec.experts is None:
        return LocalDispatch()
    if mesh.ep.size == 1:  # every rank has all experts: no token is sent
        dispatch = SlicedDispatch(mesh, wgrad_queue)
        # Nobody on the host asks how many tokens an expert has; what is deferred leaves a graph, and PyTorch's compiler
        # knows the kernel of bfloat16 alone.
        widths, bf16 = (spec.hidden, spec.experts.ffn), dtype == torch.bfloat16
        dispatch.in_graph = wgrad_queue is None and bf16 and has_kernel(mesh.device.type, torch.bfloat16, *widths)
        return dispatch
    return (AllGatherDispatch if mesh.layout.dispatch == "allgather" else AllToAllDispatch)(mesh, wgrad_queue)
