"""What rank 0 keeps of a run beside its checkpoints: the job, the environment, metrics, TensorBoard's file, the trace.

What cannot be written before the first step ends the run with a sentence. Later on it ends no training: a note says so,
once, and a run that could not keep all that it promised ends with exit code 1.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from fivefold.job.config import Job, to_toml
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.files import cannot_write, put
from fivefold.support.formatting import counted
from fivefold.trace.records import Trace
from fivefold.trace.result import TraceFile
from fivefold.train.directories import owners, sign
from fivefold.train.metrics import MetricsFile, trim
from fivefold.train.records import Decision, Evaluation, Step, TensorBoard

Say = Callable[[str], None]
_BOARD = "TensorBoard's file"


class Outputs:
    """Files of a run in its `directory`. `done`: the steps before the first that will come."""

    def __init__(self, directory: Path, job: Job, environment: Mapping[str, object], done: int, say: Say):
        self.directory, self.say = directory, say
        self.lost: list[str] = []  # what was promised and is not there
        self.runs = owners(directory) or []
        self.described = {"job.toml": to_toml(job), "environment.json": json.dumps(environment, indent=2) + "\n"}
        self.traced = TraceFile(directory / "trace.json")
        metrics = directory / "metrics.jsonl"
        try:
            self.handle = os.open(directory, os.O_RDONLY)  # as long as it is open, no other has the directory's number
            self.describe()
            self.earlier, damaged = trim(metrics, done)
            self.metrics = MetricsFile(metrics, say)
            self.board = TensorBoard(directory / "tensorboard", done + 1) if job.run.tensorboard else None
        except OSError as error:
            raise cannot_write(Path(error.filename or directory), error) from None
        if damaged:
            say(f"{metrics}: {counted(damaged, 'line')}, damaged or half written, left out")

    def describe(self) -> None:
        for name, text in self.described.items():
            put(self.directory / name, text)

    @property
    def gone(self) -> bool:
        """Whether the directory was deleted or moved away: another one of its name would be none of this run's."""
        try:
            return not os.path.samestat(os.stat(self.directory), os.fstat(self.handle))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def vanished(self) -> bool:
        """Whether it is gone. Then there is a new one, which the last checkpoint and the same command find."""
        if self.gone:
            with suppress(OSError, UserError):
                self.directory.mkdir(parents=True, exist_ok=True)
                self.describe()
                sign(self.directory, self.runs)
        return self.gone

    def keep(self, what: str | Path, write: Callable[[], object]) -> None:
        """Write something in mid-run that training can do without."""
        try:
            write()
        except OSError as error:
            self.lost.append(f"{what} cannot be written: {error.strerror or error}")
            self.say(f"{self.lost[-1]}; training goes on without it")
            self.board = None if what == _BOARD else self.board

    def on_step(self, record: Step) -> None:
        self.metrics.on_step(record)
        if board := self.board:
            self.keep(_BOARD, lambda: board.on_step(record))

    def on_evaluation(self, record: Evaluation) -> None:
        self.metrics.on_evaluation(record)
        if board := self.board:
            self.keep(_BOARD, lambda: board.on_evaluation(record))

    def on_decision(self, record: Decision) -> None:
        self.keep(self.metrics.path, lambda: self.metrics.on_decision(record))
        if board := self.board:
            self.keep(_BOARD, lambda: board.on_decision(record))

    def trace(self, trace: Trace) -> None:
        self.keep(self.traced.path, lambda: self.traced(trace))

    def close(self) -> None:
        self.metrics.close()
        if self.board:
            self.board.close()
        if self.metrics.lost:
            records = f"{counted(self.metrics.lost, 'record')} of {self.metrics.path}"
            self.lost.append(f"{records} could not be kept: {self.metrics.why}")

    def judge(self) -> None:
        """After the last step: raise what is missing."""
        if self.gone:
            raise vanishing(self.directory)
        if self.lost:
            raise TrainingError(f"all steps are done, but {'; '.join(self.lost)}")


def vanishing(directory: Path) -> TrainingError:
    return TrainingError(
        f"{directory} was deleted or moved away during the run; a new one has the last checkpoint, unless "
        "checkpoint.save=false, and the same command goes on from it"
    )
