"""Token dispatch on one device: permute tokens into the order of their experts, and weight and sum the outputs.

`parallel/token_dispatch.py` has the same across ranks, `router.py` chooses the experts. No token is dropped: which ones
overflow would depend on the other tokens of a rank, and so on the layout.
Shapes: n tokens, E hidden, X experts, K of them for each token: n * K assignments.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.launch.waits import timed_wait
from fivefold.model.fp8 import Fp8GroupedLinear
from fivefold.model.grouped import DeferWgrad, GroupedLinear, Groups, add_bias
from fivefold.model.layers import accum_dtype
from fivefold.model.recompute import not_saved
from fivefold.model.router import Routing

# ---- host -----------------------------------------------------------------------------------------------------------
# Row counts that the host must know: to split messages, and to allocate buffers for what is received.
#
# The host waits for the device here, once for each dispatch. A dry run, whose tensors have no values, states the counts
# instead (`dry/fake.py`).


class Host:
    def groups(self, ends: Tensor, assignments: int) -> Groups:
        """Where the rows of each expert end, if all rows stay on this rank: only the device need know."""
        return Groups(ends)

    def by_expert(self, counts: Tensor, assignments: int) -> list[int]:
        """Rows of each of this rank's experts; `assignments`: of this rank's own tokens."""
        return timed_wait(counts.tolist)

    def by_rank(
        self, counts_out: Tensor, counts_in: Tensor, ranks: int, assignments: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """For each rank, the rows sent to each expert there, and those received from it for each expert here."""
        both = torch.stack((counts_out, counts_in)).unflatten(1, (ranks, -1))
        sizes_out, sizes_in = timed_wait(both.tolist)  # one wait for both
        return sizes_out, sizes_in


# ---- dispatch -------------------------------------------------------------------------------------------------------


ExpertsFn = Callable[[Tensor, Groups], Tensor]  # the experts' outputs of rows sorted by expert
SharedExpert = Callable[[], Tensor] | None  # computes the shared expert's output, while tokens are in flight


Watch = Callable[[str], AbstractContextManager[None]]
DISPATCH, COMBINE = "dispatch", "combine"  # sending tokens to experts, and their outputs back


class LocalDispatch:
    in_graph = False  # whether a compiled block may contain it
    fp8 = False  # whether the experts' matmuls are in 8-bit floats
    watch: Watch = staticmethod(lambda name: nullcontext())  # a context around dispatch and around combine
    host = Host()
    sends_tokens = False  # whether tokens go to other ranks
    reads_rows = True  # whether a backward pass on this rank reads the experts' outputs
    yield_turn: Callable[[], None] = staticmethod(lambda: None)  # called before a wait: something else may run

    def shard_parameters(self, model: nn.Module) -> None:
        """Keep only this rank's experts of a model on the meta device."""

    def own_tokens(self, x: Tensor) -> Tensor:
        """The tokens of the residual stream [B, S, E] that this rank routes, [n, E]."""
        return x.flatten(0, 1)

    def all_tokens(self, y: Tensor, like: Tensor) -> Tensor:
        """The outputs of these tokens, [n, E], as the residual stream."""
        return y.view_as(like)

    def batch_rows(self, x: Tensor) -> Tensor:
        """The batch row of each of these tokens, [n]."""
        return torch.arange(x.shape[0], device=x.device).repeat_interleave(x.shape[1])

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        """Counts of batch rows, summed over the ranks that share these rows."""
        return counts

    def run(
        self, x: Tensor, routing: Routing, experts: ExpertsFn, residual_tokens: int, shared: SharedExpert = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [n, E] -> [n, E], and the `shared` expert's output; `residual_tokens`: in this rank's residual stream."""
        with self.watching(DISPATCH):
            order, row_of = routing.order, inverse(routing.order)
            rows = Permute.apply(x, order, row_of)
        rows = experts(rows, self.host.groups(routing.ends, len(order)))
        with self.watching(COMBINE):
            y = Unpermute.apply(rows, routing.weights, order, row_of)
        return y, shared() if shared is not None else None

    def watching(self, what: str) -> AbstractContextManager[None]:
        """`watch`, but not inside a compiled graph, whose parts cannot be timed."""
        return nullcontext() if torch.compiler.is_compiling() else self.watch(what)

    def linear(self, x: Tensor, linear: Any, groups: Groups, last: bool = False) -> Tensor:
        """One linear of every expert, on the rows of each; `last`: it computes the experts' outputs."""
        function = Fp8GroupedLinear if self.fp8 else GroupedLinear

        def compute() -> Tensor:
            return function.apply(x, linear.weight, groups.ends, groups.sizes, self.defer_wgrad(linear))

        if self.reads_rows or not last:
            return add_bias(compute(), linear.bias, groups)
        shape = x.shape[0], linear.weight.shape[0] // groups.ends.shape[0]
        return add_bias(not_saved(compute, shape, x, linear.weight, groups.ends), linear.bias, groups)

    def defer_wgrad(self, linear: nn.Module) -> Callable[[], DeferWgrad | None] | None:
        """None: the weight's gradient is computed in the backward pass. Else backward calls the result, and hands a
        function that computes the gradient later to what that returns, if anything."""
        return None


def inverse(order: Tensor) -> Tensor:
    """The inverse permutation: the position of each assignment in `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Rearrange(Function):
    """Rows in another order, which `inverse` undoes. Autograd's own backward would scatter-add rows into zeros."""

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

    Backward adds up each token's K rows, the best expert's first: the order of the sum is fixed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(row_of)
        ctx.shape, ctx.top_k = x.shape, max(1, len(order) // max(1, x.shape[0]))
        return kernels.permute(x, row_of) if (kernels := _kernels(x)) else x[order // ctx.top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        # In a graph the sum is fused with that of the gradients of gate and up, which it adds.
        if not torch.compiler.is_compiling() and (kernels := _kernels(gradient)):
            return kernels.combine(gradient, ctx.saved_tensors[0], None, ctx.shape[0]), None, None
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
        if kernels := _kernels(outputs):
            return kernels.combine(outputs, row_of, weights, weights.shape[0])
        total = weights.new_zeros(weights.shape[0], outputs.shape[1])
        for rows, weight in zip(row_of.view(weights.shape).unbind(1), weights.unbind(1), strict=True):
            total = total + outputs[rows] * weight[:, None]
        return total.to(outputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        outputs, weights, order, row_of = ctx.saved_tensors
        if kernels := _kernels(outputs):
            return *kernels.combine_backward(gradient, outputs, weights, row_of), None, None
        dy = gradient[order // weights.shape[1]].to(weights.dtype)
        for_weights = (dy * outputs).sum(-1)[row_of].view(weights.shape)
        return dy.mul_(weights.flatten()[order][:, None]).to(outputs.dtype), for_weights, None, None


def _kernels(rows: Tensor) -> Any:
    """The kernels for rows on a GPU: each token's row is read or written once, not once for each of its experts."""
    if not rows.is_cuda:
        return None
    from fivefold.model import triton_kernels  # Triton's import takes a second

    return triton_kernels if rows.shape[1] <= triton_kernels.MAX_WIDTH else None
