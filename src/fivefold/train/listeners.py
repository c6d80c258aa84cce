"""Those who are told of every step: the metrics file, TensorBoard. The display is one more, in its own file."""

from pathlib import Path
from typing import Protocol

import msgspec

from fivefold.train.records import Evaluation, Step


class Listener(Protocol):
    def on_step(self, record: Step) -> None: ...

    def on_evaluation(self, record: Evaluation) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl: one line a record, flushed, so that a killed run keeps what it had."""

    def __init__(self, path: Path):
        self.file = path.open("ab", buffering=0)

    def on_step(self, record: Step) -> None:
        self.file.write(msgspec.json.encode(record) + b"\n")

    def on_evaluation(self, record: Evaluation) -> None:
        self.file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    def __init__(self, directory: Path):
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(directory))

    def on_step(self, record: Step) -> None:
        for name in ("loss", "grad_norm", "lr", "tokens_per_second", "mfu", "memory"):
            if (value := getattr(record, name)) is not None:
                self.writer.add_scalar(f"train/{name}", value, record.step)

    def on_evaluation(self, record: Evaluation) -> None:
        self.writer.add_scalar("held_out/loss", record.held_out_loss, record.step)

    def close(self) -> None:
        self.writer.close()
