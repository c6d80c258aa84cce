"""What a run reports, and who gets it: a record for each step and each evaluation, the metrics file and TensorBoard."""

from pathlib import Path
from typing import Protocol

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    step: int  # counted from 1
    loss: float  # mean over the step's target tokens, nats
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # input tokens of the step, over all ranks
    loss_tokens: int  # target tokens that carried loss
    seconds: float
    tokens_per_second: float
    mfu: float | None  # model FLOPs utilisation, attention counted full; None where the peak is not known
    memory: int  # bytes, peak so far: the GPU allocator's, or the process's resident size


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    step: int
    held_out_loss: float
    samples: int
    loss_tokens: int


class Listener(Protocol):
    def on_step(self, record: Step) -> None: ...

    def on_evaluation(self, record: Evaluation) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl: one line a record, flushed, so that a killed run keeps what it had."""

    def __init__(self, path: Path):
        self.file = path.open("ab", buffering=0)

    def on_step(self, record: Step | Evaluation) -> None:
        self.file.write(msgspec.json.encode(record) + b"\n")

    on_evaluation = on_step

    def close(self) -> None:
        self.file.close()


def trim(path: Path, step: int) -> list[Step]:
    """The steps in a metrics file up to `step`. Later records, of a run that was cut short, are removed."""
    if not path.exists():
        return []
    kept: list[bytes] = []
    steps: list[Step] = []
    for line in path.read_bytes().splitlines():
        try:
            record = msgspec.json.decode(line, type=Step | Evaluation)
        except msgspec.MsgspecError:  # a line that a killed process did not finish
            continue
        if record.step <= step:
            kept.append(line + b"\n")
            if isinstance(record, Step):
                steps.append(record)
    half = path.with_suffix(".half")
    half.write_bytes(b"".join(kept))
    half.rename(path)
    return steps


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
