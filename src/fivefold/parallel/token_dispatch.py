"""Token dispatch: tokens are sent to the ranks of their experts and back, over the ep axis.

AllToAllDispatch        counts first, then each token to the ranks of its experts, and the outputs back
AllGatherDispatch       every rank gathers all tokens and computes its own experts; outputs are reduce-scattered

`dispatch_of` chooses one; `expert_parallel.py` says which tokens a rank routes, and `model/dispatch.py` has the
dispatch on one device.
"""

import torch
from torch import Tensor
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
from fivefold.model.grouped import Groups, has_kernel
from fivefold.model.layers import accum_dtype
from fivefold.model.recompute import save_output
from fivefold.model.router import Routing
from fivefold.parallel.async_exchange import AsyncExchange, FinishExchange, StartExchange, Tensors
from fivefold.parallel.collectives import all_gather, all_to_all, reduce_scatter, wait
from fivefold.parallel.expert_parallel import ExpertParallelDispatch
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.parallel.wgrad import WeightGradQueue
from fivefold.spec.model import ModelSpec


def dispatch_of(
    spec: ModelSpec, mesh: Mesh, wgrad_queue: WeightGradQueue | None = None, dtype: torch.dtype | None = None
) -> LocalDispatch:
    """How tokens reach the experts of a layout. With `wgrad_queue`, experts can defer the gradients of their weights;
    `dtype` is that of the tokens."""
    if spec.experts is None:
        return LocalDispatch()
    if mesh.ep.size == 1:  # every rank has all experts: no token is sent
        dispatch = ExpertParallelDispatch(mesh, wgrad_queue)
        # It can be in a graph: the host needs no row counts. But deferred work leaves a graph, and PyTorch's compiler
        # supports the grouped kernel in bfloat16 only.
        widths, bf16 = (spec.hidden, spec.experts.ffn), dtype == torch.bfloat16
        dispatch.in_graph = wgrad_queue is None and bf16 and has_kernel(mesh.device.type, torch.bfloat16, *widths)
        return dispatch
    return (AllGatherDispatch if mesh.layout.dispatch == "allgather" else AllToAllDispatch)(mesh, wgrad_queue)


# ---- all-to-all -----------------------------------------------------------------------------------------------------
# Token dispatch by all-to-all: row counts first, then the rows; and the outputs back.
#
# Per layer and microbatch, with n tokens on this rank, K of X experts each, and N rows for this rank's experts:
#
#     forward     X int64 counts; n K rows of E elements out and N in; N out and n K in
#     backward    the two all-to-alls of rows again, in the opposite direction
#
# A row is sent once for each assignment, to the rank that has the expert. Full recompute sends the forward's again;
# selective recompute keeps the received rows. A rank without tokens, or whose experts got none, takes part as well.
# While tokens are in flight the shared expert computes; and before each wait for rows, forward and backward, the other
# half of an overlapped pair may run.


class AllToAllDispatch(ExpertParallelDispatch):
    sends_tokens = True
    reads_rows = False  # only the rank that gets the outputs back reads them

    def run(
        self, x: Tensor, routing: Routing, experts: ExpertsFn, residual_tokens: int, shared: SharedExpert = None
    ) -> tuple[Tensor, Tensor | None]:
        with self.sending(DISPATCH):
            order, counts, ep = routing.order, routing.counts, self.current_ep
            row_of = inverse(order)
            (counts_in,) = save_output(lambda: (wait(all_to_all(counts, ep), ep),), 1, counts)
            sizes_out, sizes_in = self.host.by_rank(counts, counts_in, self.ep.size, len(order))
            rows_sent, rows_received = [sum(sizes) for sizes in sizes_out], [sum(sizes) for sizes in sizes_in]
            dispatch = self._exchange(DISPATCH, rows_sent, rows_received)
            ticket = StartExchange.apply(dispatch, Permute.apply(x, order, row_of))
            # Rows are received in rank order, and experts compute them in expert order.
            by_expert = _experts_of(counts_in, self.ep.size, sum(rows_received)).sort(dim=0, stable=True).indices
            by_rank = inverse(by_expert)
            ends = counts_in.unflatten(0, (self.ep.size, -1)).sum(0).cumsum(0).int()  # on the device, without a wait
            groups = Groups(ends, tuple(map(sum, zip(*sizes_in, strict=True))))
        shared_output = shared() if shared is not None else None
        dispatch.pause()
        with self.sending(DISPATCH):
            # One name is reused, so that each old tensor is freed: rows are large.
            (rows,) = FinishExchange.apply(dispatch, 1, ticket)
            rows = Rearrange.apply(rows, by_expert, by_rank)
        rows = experts(rows, groups)
        with self.sending(COMBINE):
            rows = Rearrange.apply(rows, by_rank, by_expert)
            combine = self._exchange(COMBINE, rows_received, rows_sent)
            ticket = StartExchange.apply(combine, rows)
            del rows
        combine.pause()
        with self.sending(COMBINE):
            (rows,) = FinishExchange.apply(combine, 1, ticket)
            return Unpermute.apply(rows, routing.weights, order, row_of), shared_output

    def _exchange(self, what: str, sent: list[int], received: list[int]) -> AsyncExchange:
        """An exchange of rows, [sum of `sent`, E] -> [sum of `received`, E]: lists of row counts, one for each rank."""

        def forward(rows: Tensors, axis: Axis) -> Tensors:
            return (all_to_all(rows[0], axis, sent, received),)

        def backward(gradients: Tensors, axis: Axis) -> Tensors:
            return (all_to_all(gradients[0], axis, received, sent),)

        return AsyncExchange(self, what, forward, backward)


def _experts_of(counts: Tensor, ranks: int, rows: int) -> Tensor:
    """The local expert of each received row; `counts` [ranks * local experts] are numbers of rows."""
    experts = torch.arange(len(counts) // ranks, device=counts.device).repeat(ranks)
    return experts.repeat_interleave(counts, output_size=rows)


# ---- all-gather ----------------------------------------------------------------------------------------------------
# Token dispatch by all-gather: every ep rank gathers all tokens, and computes its own experts on theirs.
#
# Per layer and microbatch, with at most n tokens on a rank, K experts each, over N ranks:
#
#     forward     all-gathers of N n (E + K) elements and N n K int64, a reduce-scatter of N n E in the accumulate dtype
#     backward    reduce-scatters of N n E and N n K elements, an all-gather of N n E, all in the accumulate dtype
#
# It sends at least N/K times as much as an all-to-all, in fewer and larger messages, and the amount does not depend on
# the routing: worth it where ep is about as small as K. The outputs are summed by the reduce-scatter, rank by rank.


class AllGatherDispatch(ExpertParallelDispatch):
    sends_tokens = True

    def run(
        self, x: Tensor, routing: Routing, experts: ExpertsFn, residual_tokens: int, shared: SharedExpert = None
    ) -> tuple[Tensor, Tensor | None]:
        own_tokens, max_tokens = x.shape[0], self._max_tokens_per_rank(residual_tokens)
        with self.sending(DISPATCH):
            dispatch, choices = (AsyncExchange(self, DISPATCH, _all_gather_all, _reduce_scatter_all) for _ in range(2))
            ticket = StartExchange.apply(dispatch, _padded(x, max_tokens), _padded(routing.weights, max_tokens))
            choice_ticket = StartExchange.apply(choices, _padded(routing.chosen, max_tokens, value=-1))
        shared_output = shared() if shared is not None else None
        dispatch.pause()
        with self.sending(DISPATCH):
            tokens, weights = FinishExchange.apply(dispatch, 2, ticket)
            (chosen,) = FinishExchange.apply(choices, 1, choice_ticket)
            local_experts = routing.scores.shape[1] // self.ep.size
            local_index = chosen - self.ep.rank * local_experts  # of the expert, among those of this rank
            # The assignments to this rank's experts, sorted by expert and then by token; all others come after them.
            is_local = (local_index >= 0) & (local_index < local_experts) & (chosen >= 0)
            of_expert = local_index.where(is_local, local_experts).flatten()
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
            combine = AsyncExchange(self, COMBINE, _reduce_scatter_all, _all_gather_all)
            ticket = StartExchange.apply(combine, sums)
        combine.pause()
        with self.sending(COMBINE):
            (total,) = FinishExchange.apply(combine, 1, ticket)
            return total[:own_tokens].to(x.dtype), shared_output

    def _max_tokens_per_rank(self, residual_tokens: int) -> int:
        """The largest number of tokens that a rank routes, of those in its residual stream."""
        return len(chunk(residual_tokens, self.tp.size, 0)) if self.slices else residual_tokens


def _padded(x: Tensor, rows: int, *, value: int = 0) -> Tensor:
    """x [n, ...] with rows of `value` after its own, [rows, ...]."""
    return F.pad(x, (0, 0, 0, rows - x.shape[0]), value=value)


def _all_gather_all(tensors: Tensors, axis: Axis) -> Tensors:
    """[n, ...] of every rank -> [N n, ...], of each tensor."""
    return tuple(all_gather(tensor, axis) for tensor in tensors)


def _reduce_scatter_all(tensors: Tensors, axis: Axis) -> Tensors:
    """[N n, ...] partial sums -> [n, ...]: this rank's part of the sum, in the accumulate dtype."""
    return tuple(reduce_scatter(tensor.to(accum_dtype(tensor.dtype)), axis) for tensor in tensors)
