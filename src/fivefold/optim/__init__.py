"""Optimizers: a file for each, and its line in this table. `optimizer.name` of a job chooses one, or names a class of a
module of yours: optimizer.name=my_package.lion:Lion."""

from typing import Any

from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig, UnknownOptimizer
from fivefold.optim.muon import Muon
from fivefold.support.plugins import find, given_problems, stored

OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"adamw": AdamW, "muon": Muon}


def optimizer_named(name: Any, *, trusted: bool) -> type[OptimizerConfig]:
    """The class; a plugin's module is imported if the name is `trusted`."""
    return find("optimizer.name", name, OPTIMIZERS, OptimizerConfig, trusted=trusted)


def optimizer_problems(optimizer: OptimizerConfig) -> list[str]:
    """Of its settings; and of its class, where a program gives an object of one that is not in the table."""
    unknown = isinstance(optimizer, UnknownOptimizer)
    if not unknown and (problems := given_problems("optimizer", optimizer, OPTIMIZERS, OptimizerConfig)):
        return problems
    return [problem for holds, problem in optimizer.rules() if not holds]


def stored_optimizer(table: dict[str, Any]) -> OptimizerConfig:
    """Of a job that was stored. The first releases knew one optimizer, and did not name it."""
    return stored(table, optimizer_named, AdamW, UnknownOptimizer)
