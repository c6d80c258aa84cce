"""Modes that see every call of torch, also those of a backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def everywhere(mode: TorchFunctionMode) -> Iterator[None]:
    """Inside of this the mode is on, also in backward passes."""
    autograd: Any = torch.autograd
    usual = autograd._engine_run_backward
    autograd._engine_run_backward = within(mode, usual)
    try:
        with mode:
            yield
    finally:
        autograd._engine_run_backward = usual


def within(mode: TorchFunctionMode, run: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass is a call of torch, in which modes are off; what it calls should be in this one again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    return call
