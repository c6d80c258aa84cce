"""What a run has left in its directory: every step's figures, and how well it does on held-out data."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from fivefold.report import Block, Result, Table, Text
from fivefold.report.chart import TOP, Plot, sheet
from fivefold.report.look import BLUE, MARGIN, WIDTH
from fivefold.report.scene import Curve, Scene
from fivefold.support.formatting import counted
from fivefold.train.display import chart, drawable
from fivefold.train.metrics import read
from fivefold.train.records import Decision, Evaluation, Step

_HEIGHT = 560.0  # of the picture


@dataclass(frozen=True)
class TrainResult(Result):
    directory: Path  # has the job, the metrics and the checkpoints
    steps: list[Step]
    evaluation: Evaluation | None = None  # the last
    damaged: int = 0  # lines of the metrics that are not what was written, and are left out
    decisions: list[Decision] = field(default_factory=list)  # about steps that were spikes or no numbers

    @classmethod
    def read(cls, directory: Path) -> "TrainResult":
        records = [record for _, record in read(directory / "metrics.jsonl", sys.maxsize)]
        looks = [record for record in records if isinstance(record, Evaluation)]
        steps = [record for record in records if isinstance(record, Step)]
        decisions = [record for record in records if isinstance(record, Decision)]
        return cls(directory, steps, looks[-1] if looks else None, records.count(None), decisions)

    @property
    def losses(self) -> list[float]:
        """Of the steps that have one."""
        return [record.loss for record in self.steps if record.loss is not None]

    def to_dict(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "steps": msgspec.to_builtins(self.steps),
            "evaluation": msgspec.to_builtins(self.evaluation),
            "damaged": self.damaged,
            "decisions": msgspec.to_builtins(self.decisions),
        }

    def blocks(self) -> Iterator[Block]:
        if len(self.losses) > 1:
            yield Text("\n".join(chart([step.loss for step in self.steps], {})))
        last = self.steps[-1:]
        yield Table(
            [">step", ">loss", ">gradient norm", ">tokens/s"],
            [
                [str(step.step), _loss(step), f"{step.grad_norm:.3f}", f"{step.tokens_per_second:,.0f}"]
                for step in [*(self.steps[:1] if len(self.steps) > 1 else []), *last]
            ],
        )
        if self.evaluation is not None:
            yield Text(f"held-out loss {self.evaluation.held_out_loss:.4f} nats per token", "bold")
        for decision in self.decisions:
            yield Text(str(decision))
        if self.damaged:
            yield Text(f"{counted(self.damaged, 'line')} of the metrics are damaged and left out")
        yield Text(f"job, metrics and checkpoints are in {self.directory}")

    def scene(self) -> Scene | None:
        """The loss by step, and how well the run does on held-out data."""
        losses = drawable([step.loss for step in self.steps])
        known = [loss for loss in losses if loss is not None]
        if len(known) < 2:
            return None
        first, last = self.steps[0].step, self.steps[-1].step
        scene = sheet("Loss by step", f"{self.directory}: {last:,} steps, loss {known[-1]:.4f} at the end", _HEIGHT)
        low, high = min(known), max(known)
        room = 0.06 * ((high - low) or 1.0)
        place = (110, TOP + 6, WIDTH - 110 - MARGIN, _HEIGHT - TOP - 70)
        plot = Plot(scene, *place, (first, low - room), (last, high + room))
        plot.axis_x("step")
        plot.axis_y("loss, nats per token")
        points = zip((step.step for step in self.steps), losses, strict=True)
        for there, part in groupby(points, lambda point: point[1] is not None):
            if there:  # where there is no loss, the curve has a gap
                drawn = tuple((plot.x(step), plot.y(loss)) for step, loss in part if loss is not None)
                scene.shapes.append(Curve(drawn, BLUE, 2.0))
        return scene


def _loss(step: Step) -> str:
    return "none" if step.loss is None else f"{step.loss:.4f}"
