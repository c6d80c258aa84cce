"""Optimizers: a file for each, and its line in this table. `optimizer.name` of a job chooses one, or names a class of a
module of yours: optimizer.name=my_package.lion:Lion."""

from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig, UnknownOptimizer
from fivefold.optim.muon import Muon
from fivefold.support.plugins import Sections

OPTIMIZER_BY_NAME: dict[str, type[OptimizerConfig]] = {"adamw": AdamW, "muon": Muon}
OPTIMIZERS = Sections("optimizer.name", OptimizerConfig, OPTIMIZER_BY_NAME, UnknownOptimizer)
