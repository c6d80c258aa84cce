"""Which tokens a rank routes, and which experts it has.

With sp the residual stream is divided over tp, and so are the tokens. Without it every tp rank has them all: each
routes a slice, ragged where they do not divide, and what came of the slices is gathered. Nothing is computed, sent or
counted tp times. The router's gradients are then summands over tp; experts belong to no tp rank.
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
from fivefold.model.experts.dispatch import LocalDispatch
from fivefold.model.experts.grouped import PutOff
from fivefold.model.experts.mixture import StackedLinear
from fivefold.model.recompute import again, kept
from fivefold.parallel.collectives import all_gather, all_reduce, wait
from fivefold.parallel.deferred_wgrad import WeightGradQueue
from fivefold.parallel.mesh import Axis, Mesh
from fivefold.parallel.peer_errors import waiting


class SlicedDispatch(LocalDispatch):
    def __init__(self, mesh: Mesh, later: WeightGradQueue | None):
        self.mesh, self.ep, self.tp, self.sequence = mesh, mesh.ep, mesh.tp, mesh.sequence
        self.returning = mesh.returning or mesh.ep  # what backward passes send, which may run beside forward ones
        self.slices = mesh.tp.size > 1 and not mesh.layout.sp
        self.later = later
        self.names: dict[nn.Module, str] = {}

    def adopt(self, model: nn.Module) -> None:
        """Of every expert's linear only this rank's experts."""
        for name, module in model.named_modules():
            if isinstance(module, StackedLinear):
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
        return self.returning if again() else self.ep

    def over_sequence(self, counts: Tensor) -> Tensor:
        (total,) = kept(lambda: (wait(all_reduce(counts, self.sequence), self.sequence),), 1, counts)
        return total

    def put_off(self, linear: nn.Module) -> Callable[[], PutOff | None] | None:
        return None if self.later is None else partial(self._put_off, linear)

    def _put_off(self, linear: nn.Module) -> PutOff | None:
        """While the queue collects."""
        later = self.later
        if later is None or (works := later.open) is None:
            return None
        name, report = f"{self.names[linear]}.weight", later.report
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
        (whole,) = kept(lambda: (_gathered(y, tokens, axis),), 1, y)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient[_slice(ctx.tokens, ctx.axis)].contiguous(), None, None


def _gathered(x: Tensor, tokens: int, axis: Axis) -> Tensor:
    """Slices in rank order; the last ones are padded on the way."""
    missing = len(chunk(tokens, axis.size, 0)) - x.shape[0]
    return wait(all_gather(F.pad(x, (0, 0, 0, missing)), axis), axis)[:tokens]
