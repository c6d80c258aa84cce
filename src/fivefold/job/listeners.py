"""What hears of a run: a class with a method for each thing that happens, called on rank 0.

    fivefold train job.toml run.listeners=tensorboard,my_package.heard:Heard

A listener is a subclass of `RunListener`, and an entry of the table in `named_listeners.py`; or a class of a user's own
module. It is made without arguments. What it raises before the first step ends the run there, unless it is
`ListenerLost`; later it is said once, the listener is told no more, and the run, which trains on as it would have
without it, ends with exit code 1.
"""

import inspect
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


class ListenerLost(Exception):
    """What a listener raises that a run can do without, also at its start: a sentence that stands alone."""


class RunListener:
    """Each method does nothing, until a subclass overrides it. Records are the lines of metrics.jsonl."""

    def start(self, job: Any, directory: Path, step: int) -> None:
        """Before the first step of a start: the job, the run's directory, and how many steps earlier starts made."""

    def step(self, record: Any) -> None:
        """After a step: record.step, loss, grad_norm, lr, tokens, seconds and more."""

    def evaluation(self, record: Any) -> None:
        """After an evaluation: record.step and held_out_loss."""

    def decision(self, record: Any) -> None:
        """A step was a spike or no number. After a rollback (record.back) the steps behind it come again."""

    def checkpoint(self, step: int) -> None:
        """The checkpoint of a step is complete."""

    def end(self, step: int) -> None:
        """The start is over, after this step, however it has ended."""

    @staticmethod
    def shortcomings(kind: "type[RunListener]", name: str) -> Iterator[str]:
        """What a class lacks."""
        many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        taken = [it for it in inspect.signature(kind).parameters.values() if it.kind not in many]
        needed = [parameter.name for parameter in taken if parameter.default is parameter.empty]
        if needed:
            yield f"takes {', '.join(needed)} to be made, and a listener is made without arguments"
        if all(getattr(kind, method) is getattr(RunListener, method) for method in EVENTS):
            yield f"has none of the methods {', '.join(EVENTS)}"


def figures_of(record: Any) -> dict[str, float]:
    """What a tracker shows of a step, by name."""
    names = ("loss", "grad_norm", "lr", "tokens_per_second", "mfu", "memory")
    figures = {f"train/{name}": getattr(record, name) for name in names}
    if record.load is not None:
        loads = msgspec.to_builtins(record.load).items()
        figures |= {f"load/{name}": value for name, value in loads if name != "tokens"}
    return {name: value for name, value in figures.items() if value is not None}


EVENTS = ("start", "step", "evaluation", "decision", "checkpoint", "end")


class TensorBoard(RunListener):
    """Writes each record at once. torch's own writer does so in a thread, whose errors come as tracebacks."""

    def start(self, job: Any, directory: Path, step: int) -> None:
        """What its files have of steps after `step` is not shown."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = directory / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self.file = (folder / name).open("ab", buffering=0)
        self.records = RecordWriter(self.file)
        self._write(file_version="brain.Event:2")
        self._begin(step + 1)

    def _begin(self, first: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=first, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.records.write(Event(wall_time=time.time(), **what).SerializeToString())

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        named = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=named))

    def step(self, record: Any) -> None:
        self._scalars(record.step, figures_of(record))

    def evaluation(self, record: Any) -> None:
        self._scalars(record.step, {"held_out/loss": record.held_out_loss})

    def decision(self, record: Any) -> None:
        """1 where a step was a spike or no number; what a rollback has undone is not shown."""
        if record.back is not None:
            self._begin(record.back + 1)
        self._scalars(record.place, {f"watch/{record.action}": 1.0})

    def end(self, step: int) -> None:
        self.file.close()
