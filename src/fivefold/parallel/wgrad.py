"""Deferred weight gradients: the backward pass (I) queues them, and the pipeline computes them later (W).

A linear's backward computes the gradient of the input, for which the previous stage waits, and the gradient of the
weight, for which nothing waits. While a `WeightGradQueue` is collecting, linears compute the former and append the
latter as a task.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

WgradTask = Callable[[], None]


class WeightGradQueue:
    def __init__(self) -> None:
        self.report: Callable[[str, Tensor], None] | None = None  # called with each gradient and its parameter's name
        self.tasks: list[WgradTask] | None = None  # None: not collecting, gradients are computed at once

    @contextmanager
    def collecting(self) -> Iterator[list[WgradTask]]:
        """A context in which linears append their tasks to the list."""
        self.tasks = []
        try:
            yield self.tasks
        finally:
            self.tasks = None


@dataclass(frozen=True)
class Target:
    """The parameter of a deferred gradient. `rows`: only these of its `height` rows were used."""

    name: str
    rows: slice | None = None
    height: int = 0

    def full(self, gradient: Tensor) -> Tensor:
        """The gradient of all rows, zero where they were not used."""
        if self.rows is None:
            return gradient
        padded = gradient.new_zeros(self.height, *gradient.shape[1:])
        padded[self.rows] = gradient
        return padded


@dataclass(frozen=True)
class Deferral:
    """Defers the weight gradients of one linear, or of several with the same input."""

    wgrad_queue: WeightGradQueue
    targets: tuple[Target, ...]

    @property
    def collecting(self) -> bool:
        return self.wgrad_queue.tasks is not None

    def defer(self, inputs: Callable[[], Tensor], gradients: list[Tensor]) -> None:
        """Defer dW = dY^T x for each weight. `inputs` gives x [N, in]; `gradients` are the dY, [N, out] each."""
        assert self.wgrad_queue.tasks is not None

        @torch.no_grad()  # it runs outside of a backward pass
        def task() -> None:
            x, report = inputs(), self.wgrad_queue.report
            assert report is not None
            for target, gradient in zip(self.targets, gradients, strict=True):
                report(target.name, target.full(gradient.T @ x))

        self.wgrad_queue.tasks.append(task)
