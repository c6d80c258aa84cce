"""What a run reports, and who gets it: a record for each step and each evaluation, and TensorBoard."""

import os
import socket
import time
from pathlib import Path
from typing import Any, Protocol

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


class TensorBoard:
    """Writes each record at once. torch's own writer does so in a thread, whose errors come as tracebacks."""

    def __init__(self, directory: Path, first: int):
        """`first` step that will be written: what the files have of later ones is not shown."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self.file = (directory / name).open("ab", buffering=0)
        self.records = RecordWriter(self.file)
        self._write(file_version="brain.Event:2")
        self._write(step=first, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.records.write(Event(wall_time=time.time(), **what).SerializeToString())

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        named = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=named))

    def on_step(self, record: Step) -> None:
        names = ("loss", "grad_norm", "lr", "tokens_per_second", "mfu", "memory")
        found = {f"train/{name}": getattr(record, name) for name in names}
        self._scalars(record.step, {name: value for name, value in found.items() if value is not None})

    def on_evaluation(self, record: Evaluation) -> None:
        self._scalars(record.step, {"held_out/loss": record.held_out_loss})

    def close(self) -> None:
        self.file.close()
