"""An asynchronous collective as two autograd functions, start and finish, so that other work can run in between.

    exchange = AsyncExchange(dispatch, DISPATCH, forward, backward)
    ticket = StartExchange.apply(exchange, x)          forward starts forward(x); backward waits for the gradient
    ...                                                overlaps with the collective; so does its backward pass
    exchange.pause()                                   the other half of an overlapped pair runs, if there is one
    (y,) = FinishExchange.apply(exchange, 1, ticket)   forward waits for y; backward starts backward(gradient)

Autograd runs ready nodes in the reverse order of their creation. So the backward pass of the work in between runs
after the gradient's collective is started, and before it is waited for. Selective recompute keeps the received
tensors, and sends nothing again.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.model.recompute import save_output
from fivefold.parallel.collectives import wait
from fivefold.parallel.expert_parallel import ExpertParallelDispatch
from fivefold.parallel.mesh import Axis

Tensors = tuple[Tensor, ...]
# Starts collectives of the tensors, and returns the results to wait for.
StartCollectives = Callable[[Tensors, Axis], Tensors]


class AsyncExchange:
    """One exchange of a layer and microbatch. `forward` and `backward` start the collectives of the two passes."""

    def __init__(
        self, dispatch: ExpertParallelDispatch, what: str, forward: StartCollectives, backward: StartCollectives
    ):
        self.dispatch, self.what, self.forward, self.backward = dispatch, what, forward, backward
        self.in_flight: Tensors = ()
        self.sent: Tensors = ()  # inputs of the collectives in flight, which must not be freed
        self.axis: Axis | None = None

    def start(self, start_collectives: StartCollectives, axis: Axis, tensors: Tensors) -> tuple[()]:
        """Start the collectives of a pass; returns no results, in the form that `save_output` takes."""
        self.sent, self.axis, self.in_flight = tensors, axis, start_collectives(tensors, axis)
        return ()

    def pause(self) -> None:
        """Before the wait: let the other half of an overlapped pair run. Nothing is in flight in a recomputation, which
        reads saved results."""
        if self.in_flight:
            self.dispatch.yield_turn()

    def finish(self) -> Tensors:
        """Wait for the results."""
        assert self.axis is not None
        received = tuple(wait(tensor, self.axis) for tensor in self.in_flight)
        self.sent = self.in_flight = ()
        return received


class StartExchange(Function):
    """Tensors -> a ticket: an empty tensor, which makes the finish a successor in autograd's graph."""

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
    """A ticket -> the received tensors, as many as were sent."""

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
