"""Optimizers: a file for each, and its line in this table. `optimizer.name` of a job chooses one."""

from typing import TYPE_CHECKING, Union

from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig

OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"adamw": AdamW}

if TYPE_CHECKING:
    AnyOptimizer = OptimizerConfig
else:
    AnyOptimizer = Union[tuple(OPTIMIZERS.values())]  # noqa: UP007  (a type that msgspec reads by the name)
