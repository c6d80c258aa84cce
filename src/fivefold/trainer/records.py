"""The records of a run, for each step, evaluation and decision; and what writes them: metrics.jsonl."""

import io
import math
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

import msgspec

from fivefold.support.errors import UserError
from fivefold.support.files import open_regular
from fivefold.support.parsing import PARSE_ERRORS
from fivefold.support.text import bytes_text

Whole = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]  # integers that every JSON reader represents exactly
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The load of experts in a step. Each token counts as often as it visits experts."""

    fullest: float  # tokens of the most loaded expert of any layer, over the mean of its layer
    entropy: float  # of the tokens over a layer's experts, relative to an even load; the mean over layers
    balance_loss: float | None = (
        None  # per sequence, the mean over layers, before its factor; 1: even. None: turned off
    )
    z_loss: float | None = None  # per token, likewise
    dropped: Whole = 0  # expected visits that were not made: none, since no expert has a capacity
    tokens: list[list[Natural]] | None = None  # by layer and expert, in steps for which a log line is printed

    @classmethod
    def of(cls, tokens: list[list[int]], expected: int, *, by_expert: bool = True, **losses: float | None) -> "Load":
        """The load of a step. `tokens`: by layer and expert; `expected`: visits of all its tokens in one layer."""
        return cls(
            fullest=max(max(layer) * len(layer) / max(1, sum(layer)) for layer in tokens),
            entropy=sum(map(evenness, tokens)) / len(tokens),
            dropped=expected * len(tokens) - sum(map(sum, tokens)),
            tokens=tokens if by_expert else None,
            **losses,
        )


def evenness(layer: list[int]) -> float:
    """The entropy of a layer's load relative to an even load: 0 if one expert gets all, 1 if all get the same."""
    shares = [tokens / sum(layer) for tokens in layer if tokens]
    return sum(-share * math.log(share) for share in shares) / math.log(len(layer)) if len(layer) > 1 else 1.0


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    step: Whole  # counted from 1
    loss: float | None  # mean over the step's target tokens that carry loss, nats; None: none of them does
    grad_norm: float  # before clipping
    lr: float
    tokens: Whole  # input tokens of the step, over all ranks
    loss_tokens: Whole  # target tokens that carried loss
    seconds: float
    tokens_per_second: float
    mfu: float | None  # model FLOPs utilisation, attention counted full; None where the peak is not known
    memory: Whole  # bytes, peak so far: the GPU allocator's, or the process's resident size
    load: Load | None = None  # of experts, where the model has any
    samples: Whole | None = None  # samples of the data order used so far, and the number of the next one


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    step: Whole
    held_out_loss: float
    samples: Whole
    loss_tokens: Whole


class StepDecision(msgspec.Struct, frozen=True, kw_only=True, tag="decision", tag_field="kind"):
    """The decision about a step that was a spike or not finite."""

    step: Whole
    first: Whole  # the first sample of its batch
    samples: Whole  # samples of the data order used so far, and the number of the next one
    why: Literal["spike", "nonfinite"]
    action: Literal["warn", "skip", "rollback"]
    loss: float | None  # None: not finite
    grad_norm: float | None
    usual_loss: float | None = None  # the medians of the steps before
    usual_norm: float | None = None
    back: Whole | None = None  # the step that a rollback returned to
    back_samples: Whole | None = None  # samples used by then

    @property
    def changes(self) -> bool:
        """Whether it changes the weights of the run: a skip or a rollback."""
        return self.action != "warn"

    @property
    def place(self) -> int:
        """The step after which the run continued."""
        return self.step if self.back is None else self.back

    @property
    def finding(self) -> str:
        """A text: the step, its numbers and what is wrong with them."""
        numbers = f"loss {_number(self.loss)}, gradient norm {_number(self.grad_norm)}"
        if self.usual_loss is not None:
            numbers += f" (usual are {_number(self.usual_loss)} and {_number(self.usual_norm)})"
        problem = "a spike" if self.why == "spike" else "not finite"
        return f"step {self.step}: {numbers}: {problem}; samples {self.first} to {self.samples - 1}"

    def __str__(self) -> str:
        outcomes = {
            "warn": "training continues",
            "skip": "skipped: no update is made, and the samples are used up",
            "rollback": f"rolled back to the state after step {self.back}, and on with sample {self.samples}",
        }
        return f"{self.finding}; {outcomes[self.action]}"


class Digest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of a parameter after a step; `trainer/parameter_digests.py` says how they are made."""

    bits: str  # 16 hexadecimal digits, which any flipped bit changes
    norm: float | None  # None, here and in the sketch: not finite
    sketch: tuple[float | None, ...]  # the differences of two have the size of the parameters' distance


class Digests(msgspec.Struct, frozen=True, kw_only=True, tag="digests", tag_field="kind"):
    """The parameters after a step: a line of digests.jsonl."""

    step: Whole
    parameters: dict[str, Digest]
    unequal: list[str] = []  # those of which not all ranks hold the same bits


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag="judged", tag_field="kind"):
    """How far an earlier start came: steps of samples before this number are not checked for spikes again."""

    samples: Whole


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"


@runtime_checkable
class Deciding(Protocol):
    """A listener that also gets decisions."""

    def on_decision(self, record: StepDecision) -> None: ...


@runtime_checkable
class Digesting(Protocol):
    """A listener that also gets digests of parameters."""

    def on_digests(self, record: Digests) -> None: ...


class Listener(Protocol):
    def on_step(self, record: Step) -> None: ...

    def on_evaluation(self, record: Evaluation) -> None: ...

    def close(self) -> None: ...


# ---- metrics --------------------------------------------------------------------------------------------------------
# metrics.jsonl: a line for each record, with its CRC, so that damaged lines are detected, counted and left out.


Record = Step | Evaluation | StepDecision | Judged | Digests  # the last two in decisions.jsonl and digests.jsonl alone
METRICS_FILE, DIGESTS_FILE = "metrics.jsonl", "digests.jsonl"
AS_THE_MODEL_HAS_IT = "{} as the model has it"  # a weight that is a copy of its master
_CRC_FIELD = re.compile(rb',"crc":"([0-9a-f]{8})"}\n?\Z')
MAX_FILE_BYTES = 1 << 32  # a limit, since another process may have written the file
RECENT_BYTES = 1 << 26  # at the end of the file: some 150,000 steps
_MAX_LINE_BYTES = 1 << 22
_MAX_WAITING_BYTES = 1 << 24  # of records that wait in memory for free disk space


def to_line(record: Record) -> bytes:
    body = msgspec.json.encode(record)
    return body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body)


def from_line(line: bytes) -> Record | None:
    """The record of a line; None if the line is damaged. Lines of earlier releases have no CRC."""
    if not line.lstrip().startswith(b"{"):  # quicker than the decoder
        return None
    checksum = _CRC_FIELD.search(line)
    if checksum is None and b'"crc"' in line:
        return None
    if checksum is not None and zlib.crc32(line[: checksum.start()] + b"}") != int(checksum[1], 16):
        return None
    try:
        record: Record = msgspec.json.decode(line, type=Record)
    except PARSE_ERRORS:
        return None
    if isinstance(record, Step) and not record.loss_tokens:  # earlier releases wrote a loss of 0
        return msgspec.structs.replace(record, loss=None)
    return record


def read(path: Path, most: int = MAX_FILE_BYTES) -> Iterator[tuple[bytes, Record | None]]:
    """(line, its record or None if damaged), for every line of the file; nothing if there is no file.

    Raises UserError if it has more than `most` bytes.
    """
    try:
        raw = open_regular(path)
    except FileNotFoundError:
        return
    with io.BufferedReader(raw) as file:
        if (size := os.fstat(raw.fileno()).st_size) > most:
            raise UserError(
                f"{path} has {bytes_text(size)}, and at most {bytes_text(most)} are read; move it away: its run goes "
                "on without it, and writes a new one",
                "file.size",
            )
        while line := file.readline(_MAX_LINE_BYTES):
            yield line, from_line(line)


def read_recent(path: Path, most: int = RECENT_BYTES) -> tuple[list[Record | None], int]:
    """(records of the file's last `most` bytes, the number of bytes before them); None for each damaged line.

    For commands that show a run: reading a long file would take minutes.
    """
    try:
        raw = open_regular(path)
    except FileNotFoundError:
        return [], 0
    with io.BufferedReader(raw) as file:
        start = max(0, os.fstat(raw.fileno()).st_size - most)
        if start:
            start += len(
                os.pread(raw.fileno(), _MAX_LINE_BYTES, start - 1).partition(b"\n")[0]
            )  # to the start of a line
        file.seek(start)
        return [from_line(line) for line in iter(lambda: file.readline(_MAX_LINE_BYTES), b"")], start


def step_of(record: Record) -> int:
    """The step after which a record belongs."""
    if isinstance(record, Judged):
        return 0
    return record.place if isinstance(record, StepDecision) else record.step


def trim(path: Path, step: int, most: int = MAX_FILE_BYTES) -> tuple[list[Step], int]:
    """Removes damaged lines and records after `step`. Returns (steps that are left, number of damaged lines)."""
    steps, damaged, changed = [], 0, False
    for line, record in read(path, most):
        damaged += record is None
        changed |= record is None or step_of(record) > step or not line.endswith(b"\n")
        if isinstance(record, Step) and record.step <= step:
            steps.append(record)
    if changed:
        half = path.with_suffix(".half")
        half.unlink(missing_ok=True)  # a pipe there would wait for a reader
        with half.open("wb") as file:
            for line, record in read(path, most):
                if record and step_of(record) <= step:
                    file.write(line.rstrip() + b"\n")
        half.rename(path)
    return steps, damaged


class MetricsFile:
    """Writes each record at once, so that a killed run keeps what it had.

    Records that cannot be written wait in memory, and training continues. `lost` counts the records that did not fit
    into memory either, or were deleted.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None):
        self.path, self.say = path, say
        self.file = self._open()
        self.waiting, self.written, self.lost, self.why = b"", 0, 0, ""

    def _open(self) -> io.FileIO:
        return open_regular(self.path, append=True)

    def on_step(self, record: Record) -> None:
        self.waiting += to_line(record)
        try:
            self._write()
        except OSError as error:
            if not self.why:
                self.say(f"{self.path} cannot be written: {error.strerror}; its records wait, and training continues")
            self.why = error.strerror or str(error)
        if len(self.waiting) > _MAX_WAITING_BYTES:
            self.lost, self.waiting = self.lost + self.waiting.count(b"\n"), b"\n"  # ends a line that was half written

    on_evaluation = on_step

    def on_decision(self, record: StepDecision) -> None:
        """Writes the decision; before a rollback removes the steps that it undoes, so that the file has one curve."""
        if record.back is not None and not self.waiting:
            self.file.close()
            try:
                trim(self.path, record.back, sys.maxsize)  # however long: it is this run's own
            finally:
                self.file = self._open()
        self.on_step(record)

    def _write(self) -> None:
        if not self._in_place():
            deleted, self.file = self.file, self._open()
            deleted.close()
            self.lost, self.written, self.why = self.lost + self.written, 0, "it was deleted"
            self.say(f"{self.path} was deleted or moved away; a new one has the records from here on")
        while self.waiting:
            size = self.file.write(self.waiting)
            self.written += self.waiting.count(b"\n", 0, size)
            self.waiting = self.waiting[size:]

    def _in_place(self) -> bool:
        """Whether the path still names the open file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Tries once more to write what waits, and closes the file."""
        with suppress(OSError):
            self._write()
        self.file.close()
        self.lost += self.waiting.count(b"\n")
