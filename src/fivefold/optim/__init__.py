"""Optimizers: a file for each, and its line in this table. `optimizer.name` of a job chooses one, or names a class of a
module of yours: optimizer.name=my_package.lion:Lion."""

from typing import Any, cast

import msgspec

from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig, UnknownOptimizer
from fivefold.support.errors import UserError
from fivefold.support.plugins import adopt, find, is_plugin

OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"adamw": AdamW}


def optimizer_named(name: Any, *, trusted: bool) -> type[OptimizerConfig]:
    """The class; a plugin's module is imported if the name is `trusted`."""
    return find("optimizer.name", name, OPTIMIZERS, OptimizerConfig, trusted=trusted)


def optimizer_problems(optimizer: OptimizerConfig) -> list[str]:
    """Of its settings; and of its class, where a program gives an object of one that is not in the table."""
    kind = type(optimizer)
    if not isinstance(optimizer, UnknownOptimizer) and OPTIMIZERS.get(optimizer.name) is not kind:
        try:
            adopt("optimizer", kind, OptimizerConfig)
        except UserError as error:
            return error.coded
    return [problem for holds, problem in optimizer.rules() if not holds]


def stored_optimizer(table: dict[str, Any]) -> OptimizerConfig:
    """Of a job that was stored. Its name never causes an import: a plugin that is not here keeps its settings alone."""
    name = table.get("name", AdamW().name)
    settings = {key: value for key, value in table.items() if key != "name"}
    try:
        kind = optimizer_named(name, trusted=False)
    except UserError as error:
        if not is_plugin(name) or error.codes != ["plugin.untrusted"]:
            raise
        own = [(key, Any) for key in settings if key not in UnknownOptimizer.__struct_fields__]
        options: dict[str, Any] = {"bases": (UnknownOptimizer,), "tag": name, "frozen": True, "kw_only": True}
        kind = cast(type[OptimizerConfig], msgspec.defstruct("UnknownOptimizer", own, **options))
    return msgspec.convert(settings, kind)
