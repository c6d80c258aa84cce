"""What a run has left in its directory: every step's figures, and how well it does on held-out data."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fivefold.report import Block, Result, Table, Text
from fivefold.report.svg import COLOURS, document, path, text
from fivefold.support.formatting import counted
from fivefold.train.display import chart, drawable
from fivefold.train.metrics import read
from fivefold.train.records import Evaluation, Step

_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 240, 48, 16  # of the picture


@dataclass(frozen=True)
class TrainResult(Result):
    directory: Path  # has the job, the metrics and the checkpoints
    steps: list[Step]
    evaluation: Evaluation | None = None  # the last
    damaged: int = 0  # lines of the metrics that are not what was written, and are left out

    @classmethod
    def read(cls, directory: Path) -> "TrainResult":
        records = [record for _, record in read(directory / "metrics.jsonl")]
        looks = [record for record in records if isinstance(record, Evaluation)]
        steps = [record for record in records if isinstance(record, Step)]
        return cls(directory, steps, looks[-1] if looks else None, records.count(None))

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.steps]

    def to_dict(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "steps": msgspec.to_builtins(self.steps),
            "evaluation": msgspec.to_builtins(self.evaluation),
            "damaged": self.damaged,
        }

    def blocks(self) -> Iterator[Block]:
        if len(self.steps) > 1:
            yield Text("\n".join(chart(self.losses, {})))
        last = self.steps[-1:]
        yield Table(
            [">step", ">loss", ">gradient norm", ">tokens/s"],
            [
                [str(step.step), f"{step.loss:.4f}", f"{step.grad_norm:.3f}", f"{step.tokens_per_second:,.0f}"]
                for step in [*(self.steps[:1] if len(self.steps) > 1 else []), *last]
            ],
        )
        if self.evaluation is not None:
            yield Text(f"held-out loss {self.evaluation.held_out_loss:.4f} nats per token", "bold")
        if self.damaged:
            yield Text(f"{counted(self.damaged, 'line')} of the metrics are damaged and left out")
        yield Text(f"job, metrics and checkpoints are in {self.directory}")

    def svg(self) -> str | None:
        """The loss by step."""
        losses = drawable(self.losses)
        if len(losses) < 2:
            return None
        top, bottom = max(losses), min(losses)
        span = (top - bottom) or 1.0
        points = [
            (_LEFT + _WIDTH * at / (len(losses) - 1), _TOP + _HEIGHT * (top - loss) / span)
            for at, loss in enumerate(losses)
        ]
        labels = [
            text(_LEFT - 6, _TOP + 4, f"{top:.2f}", text_anchor="end"),
            text(_LEFT - 6, _TOP + _HEIGHT, f"{bottom:.2f}", text_anchor="end"),
            text(_LEFT + _WIDTH, _TOP + _HEIGHT + 20, f"step {self.steps[-1].step}", text_anchor="end"),
        ]
        line = path(points, fill="none", stroke=COLOURS[0], stroke_width=1.4)
        size = (_LEFT + _WIDTH + 16, _TOP + _HEIGHT + 32)
        return document(*size, [line, *labels], title="loss by step", font_size=12)
