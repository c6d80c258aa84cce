"""What ranks report to the process that has started them, as a notebook does: lines of JSON in a file of its own.

    report = ReportWriter(path)               # in a rank
    report.send(Printed("step 1/3 ..."))
    follower.poll()                     # in the process that waits: what is new reaches its callbacks

A file and no pipe, so that no rank waits for a reader that is busy. Nothing in it is executed: a message is one of the
types below, or it is left out.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from fivefold.support.errors import TrainingError, UserError
from fivefold.support.parsing import BROKEN
from fivefold.trainer.records import Evaluation, Step

_LAST = 20  # sentences of a failure that are shown


class Printed(msgspec.Struct, frozen=True, tag="printed", tag_field="kind"):
    """A line that a person would read."""

    line: str


class RefusedInput(msgspec.Struct, frozen=True, tag="refused", tag_field="kind"):
    """Bad input, as a rank has found it."""

    problems: list[str]
    codes: list[str]


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="kind"):
    """Why a rank does not go on."""

    sentence: str


class Finished(msgspec.Struct, frozen=True, tag="finished", tag_field="kind"):
    """All steps are done."""

    directory: str


Message = Printed | RefusedInput | Failed | Finished | Step


def _decoded(line: bytes) -> Message | None:
    try:
        message: Message = msgspec.json.decode(line, type=Message)
    except BROKEN:  # half a line: the disk was full
        return None
    return message


class ReportWriter:
    """A rank's end of it, and a listener of its steps."""

    def __init__(self, path: Path):
        self.handle = os.open(path, os.O_WRONLY | os.O_APPEND)

    def send(self, message: Message) -> None:
        """In one write, so that those of several ranks stay apart. One that cannot be written stops no training."""
        with suppress(OSError):
            os.write(self.handle, msgspec.json.encode(message) + b"\n")

    def say(self, line: str) -> None:
        self.send(Printed(line))

    def on_step(self, record: Step) -> None:
        self.send(record)

    def on_evaluation(self, record: Evaluation) -> None:
        """The result has the last one."""

    def close(self) -> None:
        """It stays open: what comes after the last step is reported, too."""


class ReportedOutput:
    """A stream for a console: its lines are reported, and printed, so that the rank's log has them."""

    encoding = "utf-8"

    def __init__(self, report: ReportWriter):
        self.report, self.half = report, ""

    def write(self, text: str) -> int:
        with suppress(OSError, UnicodeError):  # the log's encoding may know fewer letters
            sys.stdout.write(text)
        *lines, self.half = (self.half + text).split("\n")
        for line in lines:
            self.report.say(line)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stdout.flush()


class Follower:
    """The reader's end. `progress` gets every line, and `on_record` every step.

    The launcher's own sentences come by `say`, and wait for the next `poll`: a handler of signals may say one while a
    callback runs.
    """

    def __init__(self, path: Path, progress: Callable[[str], object], on_record: Callable[[Step], object]):
        path.touch(0o600)
        self.file = path.open("rb")
        self.progress, self.on_record = progress, on_record
        self.half, self.over = b"", False
        self.said: list[str] = []
        self.directory: Path | None = None  # of a run that has made all its steps
        self.refused: list[RefusedInput] = []
        self.story: list[str] = []  # what ranks and their launcher said of failures

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def poll(self) -> None:
        """After an exception of a callback there is nobody to tell more."""
        if self.over:
            return
        self.over = True
        *lines, self.half = (self.half + self.file.read()).split(b"\n")
        for line in lines:
            if message := _decoded(line):
                self._hear(message)
        while self.said:
            self.story.append(self.said.pop(0))
            self.progress(self.story[-1])
        self.over = False

    def _hear(self, message: Message) -> None:
        match message:
            case Printed():
                self.progress(message.line)
            case Step():
                self.on_record(message)
            case Failed():
                self.story.append(message.sentence)
            case RefusedInput():
                self.refused.append(message)
            case Finished():
                self.directory = Path(message.directory)

    def close(self) -> None:
        self.file.close()

    def refusal(self) -> UserError:
        error = UserError(dict.fromkeys(problem for refused in self.refused for problem in refused.problems))
        error.codes = list(dict.fromkeys(code for refused in self.refused for code in refused.codes))
        return error

    def failure(self, code: int) -> TrainingError:
        told = list(dict.fromkeys(self.story))[-_LAST:]
        return TrainingError("\n".join(told) or f"the run ended with exit code {code}")
