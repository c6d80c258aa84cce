"""Losses: a file for each, and its line in this table. `loss.name` of a job chooses one, or names a class of a module
of yours: loss.name=my_package.focal:Focal."""

from typing import Any

from fivefold.losses.base import Loss, UnknownLoss
from fivefold.losses.cross_entropy import CrossEntropy
from fivefold.support.plugins import find, given_problems, stored

LOSSES: dict[str, type[Loss]] = {"cross_entropy": CrossEntropy}


def loss_named(name: Any, *, trusted: bool) -> type[Loss]:
    """The class; a plugin's module is imported if the name is `trusted`."""
    return find("loss.name", name, LOSSES, Loss, trusted=trusted)


def loss_problems(loss: Loss) -> list[str]:
    """Of its settings; and of its class, where a program gives an object of one that is not in the table."""
    if not isinstance(loss, UnknownLoss) and (problems := given_problems("loss", loss, LOSSES, Loss)):
        return problems
    return [*loss.problems()]


def stored_loss(table: dict[str, Any]) -> Loss:
    """Of a job that was stored. The first releases knew one loss, and did not name it."""
    return stored(table, loss_named, CrossEntropy, UnknownLoss)
