"""Optimizers: a file for each, and its line in this table. `optimizer.name` of a job chooses one."""

from typing import TYPE_CHECKING, Union

from fivefold.optimizers.adamw import AdamW
from fivefold.optimizers.protocol import OptimizerConfig

__all__ = ["OPTIMIZERS", "AdamW", "AnyOptimizer", "OptimizerConfig"]

OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"adamw": AdamW}

if TYPE_CHECKING:
    AnyOptimizer = OptimizerConfig
else:
    AnyOptimizer = Union[tuple(OPTIMIZERS.values())]  # noqa: UP007  (a type that msgspec reads by the name)
