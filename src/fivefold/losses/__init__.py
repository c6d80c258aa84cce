"""Losses: a file for each, and its line in this table. `loss.name` of a job chooses one, or names a class of a module
of yours: loss.name=my_package.focal:Focal."""

from fivefold.losses.base import Loss, UnknownLoss
from fivefold.losses.cross_entropy import CrossEntropy
from fivefold.support.plugins import Sections

TABLE: dict[str, type[Loss]] = {"cross_entropy": CrossEntropy}
LOSSES = Sections("loss.name", Loss, TABLE, UnknownLoss)
