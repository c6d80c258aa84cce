"""Deferred weight gradients: the backward pass leaves them here (I), and the pipeline computes them later (W).

A linear's backward needs its weight for the gradient of the input, which the stage before waits for, and its saved
input and output gradient for the gradient of the weight, which nobody waits for. While a `WeightGradQueue` is
collecting, linears compute the first and leave the second as a piece of work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Work = Callable[[], None]


class WeightGradQueue:
    def __init__(self) -> None:
        self.report: Callable[[str, Tensor], None] | None = None  # where finished gradients go, by parameter name
        self.open: list[Work] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Work]]:
        """Inside, linears leave their work in the list."""
        self.open = []
        try:
            yield self.open
        finally:
            self.open = None


@dataclass(frozen=True)
class Target:
    """The parameter that a deferred gradient is for. `rows`: only these of its `height` rows were used."""

    name: str
    rows: slice | None = None
    height: int = 0

    def whole(self, gradient: Tensor) -> Tensor:
        if self.rows is None:
            return gradient
        padded = gradient.new_zeros(self.height, *gradient.shape[1:])
        padded[self.rows] = gradient
        return padded


@dataclass(frozen=True)
class Deferral:
    """Where the weight gradients of one linear, or of a group of linears, are reported."""

    wgrad_queue: WeightGradQueue
    targets: tuple[Target, ...]

    @property
    def collecting(self) -> bool:
        return self.wgrad_queue.open is not None

    def leave(self, inputs: Callable[[], Tensor], gradients: list[Tensor]) -> None:
        """Defer dW = dY^T x for each weight. `inputs` gives x [N, in]; `gradients` are the dY, [N, out] each."""
        assert self.wgrad_queue.open is not None

        @torch.no_grad()  # this is no part of a backward pass, in which nothing would be recorded anyway
        def work() -> None:
            x, report = inputs(), self.wgrad_queue.report
            assert report is not None
            for target, gradient in zip(self.targets, gradients, strict=True):
                report(target.name, target.whole(gradient.T @ x))

        self.wgrad_queue.open.append(work)
