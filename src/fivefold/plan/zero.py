"""`zero`: the bytes that ZeRO leaves a rank of parameters, gradients and optimizer state, by two accountings."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fivefold.plan.cost.memory import OURS, PAPER
from fivefold.report import Block, Result, Table
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.support.formatting import si
from fivefold.support.ranges import RANKS, checked, within


@dataclass(frozen=True)
class ZeroResult(Result):
    """Bytes of a rank between steps, for each ZeRO stage."""

    parameters: float
    ranks: int

    @property
    def rows(self) -> list[dict[str, float]]:
        count, ranks = self.parameters, self.ranks
        return [
            {
                "stage": stage,
                "paper": PAPER.state(count, count / ranks, stage, ranks).total,
                "parameters": ours.parameters,
                "gradients": ours.gradients,
                "optimizer": ours.optimizer,
                "total": ours.total,
            }
            for stage in range(4)
            for ours in [OURS.state(count, count / ranks, stage, ranks)]
        ]

    def blocks(self) -> Iterator[Block]:
        heads = [">stage", ">paper", ">fivefold", ">parameters", ">gradients", ">optimizer"]
        keys = ("paper", "total", "parameters", "gradients", "optimizer")
        rows = [[str(row["stage"]), *(f"{row[key] / 1e9:.4g}" for key in keys)] for row in self.rows]
        yield Table(heads, rows, f"{si(self.parameters)} parameters over {self.ranks} ranks: GB on each rank")

    def to_dict(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "ranks": self.ranks, "stages": self.rows}


def zero(model: str | float | ModelSpec, ranks: int = 64) -> ZeroResult:
    """Bytes by ZeRO stage of a model, or of a number of parameters, sharded over `ranks` (dp x cp)."""
    checked("ranks", ranks, within(1, RANKS))
    if isinstance(model, ModelSpec):
        return ZeroResult(float(model.parameter_count), ranks)
    try:
        count = float(model)
    except OverflowError:
        count = math.inf
    except ValueError:
        return ZeroResult(float(preset(str(model)).parameter_count), ranks)
    if not 1 <= count < 1e18:
        raise UserError(f"{model} parameters cannot be; give a number like 7.5e9, or a model's name")
    return ZeroResult(count, ranks)
