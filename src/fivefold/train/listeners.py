"""Listeners get a record of every step: the metrics file and TensorBoard. The display has a file of its own."""

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


def trim(path: Path, step: int) -> list[Step]:
    """The steps in a metrics file up to one; what came after it, in a run that was cut short, is cut off."""
    if not path.exists():
        return []
    kept: list[bytes] = []
    records: list[Step | Evaluation] = []
    for line in path.read_bytes().splitlines():
        try:
            record = msgspec.json.decode(line, type=Step | Evaluation)
        except msgspec.MsgspecError:  # a line that a killed process did not finish
            continue
        if record.step <= step:
            kept.append(line + b"\n")
            records.append(record)
    half = path.with_suffix(".half")
    half.write_bytes(b"".join(kept))
    half.rename(path)
    return [record for record in records if isinstance(record, Step)]


class TensorBoard:
    def __init__(self, directory: Path, first: int):
        """`first` step that will be written: what the files have of later ones is not shown."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=first)

    def on_step(self, record: Step) -> None:
        for name in ("loss", "grad_norm", "lr", "tokens_per_second", "mfu", "memory"):
            if (value := getattr(record, name)) is not None:
                self.writer.add_scalar(f"train/{name}", value, record.step)

    def on_evaluation(self, record: Evaluation) -> None:
        self.writer.add_scalar("held_out/loss", record.held_out_loss, record.step)

    def close(self) -> None:
        self.writer.close()
