"""Deferred weight gradients: the backward pass leaves them here (I), and the pipeline computes them later (W).

A linear's backward needs its weight for the gradient of the input, which the stage before waits for, and its saved
input and output gradient for the gradient of the weight, which nobody waits for. While a `WeightGradQueue` is
collecting, linears compute the first and leave the second as a task.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

WgradTask = Callable[[], None]


class WeightGradQueue:
    def __init__(self) -> None:
        self.report: Callable[[str, Tensor], None] | None = None  # where finished gradients go, by parameter name
        self.tasks: list[WgradTask] | None = None  # None: nobody collects, and gradients are computed at once

    @contextmanager
    def collecting(self) -> Iterator[list[WgradTask]]:
        """Inside, linears leave their tasks in the list."""
        self.tasks = []
        try:
            yield self.tasks
        finally:
            self.tasks = None


@dataclass(frozen=True)
class Target:
    """The parameter that a deferred gradient is for. `rows`: only these of its `height` rows were used."""

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
    """Where the weight gradients of one linear, or of a group of linears, are reported."""

    wgrad_queue: WeightGradQueue
    targets: tuple[Target, ...]

    @property
    def collecting(self) -> bool:
        return self.wgrad_queue.tasks is not None

    def defer(self, inputs: Callable[[], Tensor], gradients: list[Tensor]) -> None:
        """Defer dW = dY^T x for each weight. `inputs` gives x [N, in]; `gradients` are the dY, [N, out] each."""
        assert self.wgrad_queue.tasks is not None

        @torch.no_grad()  # this is no part of a backward pass, in which nothing would be recorded anyway
        def task() -> None:
            x, report = inputs(), self.wgrad_queue.report
            assert report is not None
            for target, gradient in zip(self.targets, gradients, strict=True):
                report(target.name, target.full(gradient.T @ x))

        self.wgrad_queue.tasks.append(task)
