"""A message of experts in two steps, sent off and waited for, so that something else can run in between.

    trip = Trip(dispatch, DISPATCH, there, back)
    ticket = SendOff.apply(trip, x)         forward starts there(x); backward waits for the gradient
    ...                                     runs while the message travels, and so does its backward pass
    trip.pause()                            the other half of a joined pair runs, where there is one
    (y,) = Arrive.apply(trip, 1, ticket)    forward waits for it; backward starts back(gradient)

Autograd runs what is ready in the reverse order of its making. So the backward pass of what was computed in between
comes when the gradient has been sent off, and before it is waited for. Selective recompute keeps what has arrived, and
sends nothing again.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.model.recompute import kept
from fivefold.parallel.collectives import wait
from fivefold.parallel.experts.slices import SlicedDispatch
from fivefold.parallel.mesh import Axis

Tensors = tuple[Tensor, ...]
Send = Callable[[Tensors, Axis], Tensors]  # starts to send them: what will come of them, and must be waited for


class Trip:
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
            self.by.hand_over()

    def end(self) -> tuple[Tensor, ...]:
        """What has come."""
        assert self.axis is not None
        come = tuple(wait(one, self.axis) for one in self.flying)
        self.sent = self.flying = ()
        return come


class SendOff(Function):
    """Tensors -> a ticket, which has no numbers; it ties the wait to this."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, *tensors: Tensor) -> Tensor:
        ctx.trip, ctx.dtypes = trip, [tensor.dtype for tensor in tensors]
        kept(lambda: trip.leave(trip.there, trip.by.going, tensors), 0, tensors[0])
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        trip: Trip = ctx.trip
        trip.pause()
        with trip.by.sending(trip.what):
            return None, *(one.to(dtype) for one, dtype in zip(trip.end(), ctx.dtypes, strict=True))


class Arrive(Function):
    """A ticket -> what has come, as many tensors as were sent off."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, count: int, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        return kept(trip.end, count, ticket)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        trip: Trip = ctx.trip
        with trip.by.sending(trip.what):
            trip.leave(trip.back, trip.by.returning, gradients)
        return None, None, gradients[0].new_empty(0)
