"""Messages of ranks to the process that has started them, such as a notebook: lines of JSON in a file.

    report = ReportWriter(path)         # in a rank
    report.send(Printed("step 1/3 ..."))
    follower.poll()                     # in the process that waits: calls its callbacks with new messages

A file and no pipe, so that no rank waits for a reader that is busy. Nothing in it is executed: a message is one of the
types below, or it is ignored.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from fivefold.support.errors import Problem, TrainingError, UserError
from fivefold.support.parsing import PARSE_ERRORS
from fivefold.trainer.records import Evaluation, Step

_MAX_SENTENCES = 20  # the last ones of a failure, which are shown


class Printed(msgspec.Struct, frozen=True, tag="printed", tag_field="kind"):
    """A line that the run prints."""

    line: str


class RefusedInput(msgspec.Struct, frozen=True, tag="refused", tag_field="kind"):
    """The problems of bad input that a rank has found."""

    problems: list[str]
    codes: list[str]  # one for each, empty where there is none


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="kind"):
    """The reason why a rank ends."""

    sentence: str


class Finished(msgspec.Struct, frozen=True, tag="finished", tag_field="kind"):
    """All steps are done."""

    directory: str


Message = Printed | RefusedInput | Failed | Finished | Step


def _decode(line: bytes) -> Message | None:
    try:
        message: Message = msgspec.json.decode(line, type=Message)
    except PARSE_ERRORS:  # half a line: the disk was full
        return None
    return message


class ReportWriter:
    """Writes a rank's messages, and listens to its steps."""

    def __init__(self, path: Path):
        self.handle = os.open(path, os.O_WRONLY | os.O_APPEND)

    def send(self, message: Message) -> None:
        """Writes a message in one call, so that messages of several ranks do not mix. Errors are ignored."""
        with suppress(OSError):
            os.write(self.handle, msgspec.json.encode(message) + b"\n")

    def say(self, line: str) -> None:
        self.send(Printed(line))

    def on_step(self, record: Step) -> None:
        self.send(record)

    def on_evaluation(self, record: Evaluation) -> None:
        """The result has the last one."""

    def close(self) -> None:
        """Keeps the file open, since messages may follow the last step."""


class ReportedOutput:
    """A stream for a console: sends its lines as messages, and prints them, so that the rank's log has them."""

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
    """Reads the messages. `progress` is called with every line, and `on_record` with every step.

    The launcher's own sentences come by `say`, and wait for the next `poll`: a signal handler may add one while a
    callback runs.
    """

    def __init__(self, path: Path, progress: Callable[[str], object], on_record: Callable[[Step], object]):
        path.touch(0o600)
        self.file = path.open("rb")
        self.progress, self.on_record = progress, on_record
        self.half = b""  # the last line, while it is not complete
        self.stopped = False  # while a callback runs, and after one has raised
        self.waiting: list[str] = []  # the launcher's sentences until the next poll
        self.directory: Path | None = None  # of a run that has made all its steps
        self.refused: list[RefusedInput] = []
        self.failures: list[str] = []  # sentences of ranks and their launcher

    def say(self, sentence: str) -> None:
        self.waiting.append(sentence)

    def poll(self) -> None:
        """Calls the callbacks with what is new; no more after one of them has raised."""
        if self.stopped:
            return
        self.stopped = True
        *lines, self.half = (self.half + self.file.read()).split(b"\n")
        for line in lines:
            if message := _decode(line):
                self._handle(message)
        while self.waiting:
            self.failures.append(self.waiting.pop(0))
            self.progress(self.failures[-1])
        self.stopped = False

    def _handle(self, message: Message) -> None:
        match message:
            case Printed():
                self.progress(message.line)
            case Step():
                self.on_record(message)
            case Failed():
                self.failures.append(message.sentence)
            case RefusedInput():
                self.refused.append(message)
            case Finished():
                self.directory = Path(message.directory)

    def close(self) -> None:
        self.file.close()

    def refusal(self) -> UserError:
        told = (pair for refused in self.refused for pair in zip(refused.codes, refused.problems, strict=True))
        return UserError(Problem(code, sentence) if code else sentence for code, sentence in dict.fromkeys(told))

    def failure(self, code: int) -> TrainingError:
        sentences = list(dict.fromkeys(self.failures))[-_MAX_SENTENCES:]
        return TrainingError("\n".join(sentences) or f"the run ended with exit code {code}")
