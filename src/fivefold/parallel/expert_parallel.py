"""Expert parallelism: which tokens a rank routes, and which experts it has.

With sp the residual stream is sharded over tp, and so are the tokens. Without it every tp rank has them all: each
routes a slice (of uneven size if they do not divide), and the outputs of the slices are gathered. Nothing is
computed, sent or counted tp times. The router's gradients are then partial sums over tp; tp does not shard experts.
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
from fivefold.model.dispatch import LocalDispatch
from fivefold.model.grouped import DeferWgrad
from fivefold.model.moe import ExpertLinear
from fivefold.model.recompute import is_recomputing, save_output
from fivefold.parallel.collectives import all_gather, all_reduce, wait, waiting
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.parallel.wgrad import WeightGradQueue


class ExpertParallelDispatch(LocalDispatch):
    """Each rank routes its slice of the tokens. The subclasses of `token_dispatch.py` send them to other ranks."""

    def __init__(self, mesh: Mesh, wgrad_queue: WeightGradQueue | None):
        self.mesh, self.ep, self.tp, self.sequence_axis = mesh, mesh.ep, mesh.tp, mesh.cp_tp
        # The group of backward passes, which may run beside forward ones.
        self.backward_ep = mesh.backward_ep or mesh.ep
        self.slices = mesh.tp.size > 1 and not mesh.layout.sp
        self.wgrad_queue = wgrad_queue
        self.names: dict[nn.Module, str] = {}

    def shard_parameters(self, model: nn.Module) -> None:
        """Replace the parameters of experts by those of this rank's experts."""
        for name, module in model.named_modules():
            if isinstance(module, ExpertLinear):
                self.names[module] = name
                for key, full in list(module.named_parameters(recurse=False)):
                    shape = full.shape[0] // self.ep.size, *full.shape[1:]
                    setattr(module, key, nn.Parameter(torch.empty(shape, dtype=full.dtype, device="meta")))

    def own_tokens(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return OwnSlice.apply(flat, self.tp) if self.slices else flat

    def all_tokens(self, y: Tensor, like: Tensor) -> Tensor:
        if self.slices:
            y = AllSlices.apply(y, like.shape[0] * like.shape[1], self.tp)
        return y.view_as(like)

    def batch_rows(self, x: Tensor) -> Tensor:
        rows = super().batch_rows(x)
        return rows[_slice(len(rows), self.tp)] if self.slices else rows

    @contextmanager
    def sending(self, what: str) -> Iterator[None]:
        """A context around a dispatch or a combine, forward or backward; the error of a lost peer names the ranks."""
        with self.watch(what), waiting(what, self.mesh, self.ep):
            yield

    @property
    def current_ep(self) -> Axis:
        """The ep axis with the group of this pass: a first forward, or a recomputation in a backward pass."""
        return self.backward_ep if is_recomputing() else self.ep

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        (total,) = save_output(lambda: (wait(all_reduce(counts, self.sequence_axis), self.sequence_axis),), 1, counts)
        return total

    def defer_wgrad(self, linear: nn.Module) -> Callable[[], DeferWgrad | None] | None:
        """A function for the backward pass to call: whether the queue collects is known only then."""
        return None if self.wgrad_queue is None else partial(self._defer, linear)

    def _defer(self, linear: nn.Module) -> DeferWgrad | None:
        """The function that defers the gradient of this linear's weight, while the queue collects."""
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
    """This rank's slice of so many tokens."""
    local = chunk(tokens, axis.size, axis.rank)
    return slice(local.start, local.stop)


class OwnSlice(Function):
    """[n, E], the same on all ranks -> this rank's slice. Backward all-gathers the gradients of the slices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.tokens, ctx.axis = x.shape[0], axis
        return x[_slice(x.shape[0], axis)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _gathered(gradient, ctx.tokens, ctx.axis), None


class AllSlices(Function):
    """This rank's slice -> [n, E], the same on all ranks; so is the gradient, and backward takes the slice of it."""

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
    """All slices in rank order; short ones are padded for the all-gather."""
    missing = len(chunk(tokens, axis.size, 0)) - x.shape[0]
    return wait(all_gather(F.pad(x, (0, 0, 0, missing)), axis), axis)[:tokens]
