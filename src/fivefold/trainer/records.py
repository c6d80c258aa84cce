"""What a run reports, and who gets it: a record for each step, evaluation and decision."""

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
from fivefold.support.parsing import BROKEN
from fivefold.support.text import bytes_text

Whole = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]  # what every reader of JSON has in full
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of a step were spread over experts. Each token counts as often as it visits experts."""

    fullest: float  # tokens of the most loaded expert of any layer, over the mean of its layer
    entropy: float  # of the tokens over a layer's experts, by that of an even load; the mean over layers
    balance_loss: float | None = None  # of a row, the mean over layers, before its factor; 1: even. None: not asked for
    z_loss: float | None = None  # of a token, likewise
    dropped: Whole = 0  # visits that were due and not made: none, since no expert has a capacity
    tokens: list[list[Natural]] | None = None  # by layer and expert, in the steps that log lines are printed of

    @classmethod
    def of(cls, tokens: list[list[int]], due: int, *, by_expert: bool = True, **losses: float | None) -> "Load":
        """Of a step; `due` are the visits of all its tokens to the experts of one layer."""
        return cls(
            fullest=max(max(layer) * len(layer) / max(1, sum(layer)) for layer in tokens),
            entropy=sum(map(evenness, tokens)) / len(tokens),
            dropped=due * len(tokens) - sum(map(sum, tokens)),
            tokens=tokens if by_expert else None,
            **losses,
        )


def evenness(layer: list[int]) -> float:
    """The entropy of a load over that of an even one: 0 where one expert gets all, 1 where all get the same."""
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
    samples: Whole | None = None  # of the data order that are used up with it: the next one is this number


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    step: Whole
    held_out_loss: float
    samples: Whole
    loss_tokens: Whole


class StepDecision(msgspec.Struct, frozen=True, kw_only=True, tag="decision", tag_field="kind"):
    """A step that was a spike, or whose numbers were none, and what was done about it."""

    step: Whole
    first: Whole  # sample of its batch
    samples: Whole  # of the data order that are used up with it: the next one is this number
    why: Literal["spike", "nonfinite"]
    action: Literal["warn", "skip", "rollback"]
    loss: float | None  # None: it is no number
    grad_norm: float | None
    usual_loss: float | None = None  # the medians of the steps before
    usual_norm: float | None = None
    back: Whole | None = None  # of a rollback: the step whose state came back
    back_samples: Whole | None = None  # that were used up by then

    @property
    def changes(self) -> bool:
        """Whether weights are others because of it."""
        return self.action != "warn"

    @property
    def place(self) -> int:
        """The step after which the run went on."""
        return self.step if self.back is None else self.back

    @property
    def finding(self) -> str:
        """What is wrong with which step."""
        numbers = f"loss {_number(self.loss)}, gradient norm {_number(self.grad_norm)}"
        known = f" (usual are {_number(self.usual_loss)} and {_number(self.usual_norm)})"
        usual = known if self.usual_loss is not None else ""
        what = "a spike" if self.why == "spike" else "not finite"
        return f"step {self.step}: {numbers}{usual}: {what}; samples {self.first} to {self.samples - 1}"

    def __str__(self) -> str:
        done = {
            "warn": "training continues",
            "skip": "skipped: no update is made, and the samples are used up",
            "rollback": f"rolled back to the state after step {self.back}, and on with sample {self.samples}",
        }
        return f"{self.finding}; {done[self.action]}"


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag="judged", tag_field="kind"):
    """How far an earlier start came: steps of these samples are not judged anew."""

    samples: Whole


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"


@runtime_checkable
class Deciding(Protocol):
    """A listener that is told of decisions, too."""

    def on_decision(self, record: StepDecision) -> None: ...


class Listener(Protocol):
    def on_step(self, record: Step) -> None: ...

    def on_evaluation(self, record: Evaluation) -> None: ...

    def close(self) -> None: ...


# ---- metrics --------------------------------------------------------------------------------------------------------
# metrics.jsonl: one line a record, each with its sum, so that a damaged line is known, counted and left out.


Record = Step | Evaluation | StepDecision | Judged  # the last in decisions.jsonl alone
METRICS = "metrics.jsonl"
_SUM = re.compile(rb',"crc":"([0-9a-f]{8})"}\n?\Z')
MOST = 1 << 32  # bytes of a file that another process may have written
RECENT = 1 << 26  # bytes of it that are shown: some 150,000 steps
_LONGEST = 1 << 22  # bytes of a line that is looked at
_KEPT = 1 << 24  # bytes of records that wait for a disk with room


def to_line(record: Record) -> bytes:
    body = msgspec.json.encode(record)
    return body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body)


def from_line(line: bytes) -> Record | None:
    """None if it is not what was written. Lines of earlier releases have no sum."""
    if not line.lstrip().startswith(b"{"):  # a decoder takes longer to say so
        return None
    checksum = _SUM.search(line)
    if zlib.crc32(line[: checksum.start()] + b"}") != int(checksum[1], 16) if checksum else b'"crc"' in line:
        return None
    try:
        record: Record = msgspec.json.decode(line, type=Record)
    except BROKEN:
        return None
    if isinstance(record, Step) and not record.loss_tokens:  # earlier releases wrote a loss of 0
        return msgspec.structs.replace(record, loss=None)
    return record


def read(path: Path, most: int = MOST) -> Iterator[tuple[bytes, Record | None]]:
    """Every line, and its record if it is sound; nothing of a file that is not there. UserError of one that has more
    than `most` bytes."""
    try:
        raw = open_regular(path)
    except FileNotFoundError:
        return
    with io.BufferedReader(raw) as file:
        if (size := os.fstat(raw.fileno()).st_size) > most:
            raise UserError(
                f"{path} has {bytes_text(size)}, and at most {bytes_text(most)} are read; move it away: its run goes "
                "on without it, and writes a new one"
            )
        while line := file.readline(_LONGEST):
            yield line, from_line(line)


def recent(path: Path, most: int = RECENT) -> tuple[list[Record | None], int]:
    """The records of a file's last `most` bytes, None for each damaged line, and how many bytes before them were left
    out: of what a person looks at, nobody waits minutes for the oldest."""
    try:
        raw = open_regular(path)
    except FileNotFoundError:
        return [], 0
    with io.BufferedReader(raw) as file:
        left = max(0, os.fstat(raw.fileno()).st_size - most)
        if left:
            left += len(os.pread(raw.fileno(), _LONGEST, left - 1).partition(b"\n")[0])  # up to a whole line
        file.seek(left)
        return [from_line(line) for line in iter(lambda: file.readline(_LONGEST), b"")], left


def place(record: Record) -> int:
    """The step after which a record stands."""
    if isinstance(record, Judged):
        return 0
    return record.place if isinstance(record, StepDecision) else record.step


def trim(path: Path, step: int, most: int = MOST) -> tuple[list[Step], int]:
    """The steps in a metrics file up to `step`, and how many lines are damaged. Those are removed, and so are later
    records, of a run that was cut short."""
    steps, damaged, change = [], 0, False
    for line, record in read(path, most):
        damaged += record is None
        change |= record is None or place(record) > step or not line.endswith(b"\n")
        if isinstance(record, Step) and record.step <= step:
            steps.append(record)
    if change:
        half = path.with_suffix(".half")
        half.unlink(missing_ok=True)  # a pipe there would wait for a reader
        with half.open("wb") as file:
            for line, record in read(path, most):
                if record and place(record) <= step:
                    file.write(line.rstrip() + b"\n")
        half.rename(path)
    return steps, damaged


class MetricsFile:
    """Writes each record at once, so that a killed run keeps what it had. What cannot be written stops no training:
    it waits in memory, and `lost` records are those of which there was no room there either, or that were deleted."""

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
        if len(self.waiting) > _KEPT:
            self.lost, self.waiting = self.lost + self.waiting.count(b"\n"), b"\n"  # which ends half a line

    on_evaluation = on_step

    def on_decision(self, record: StepDecision) -> None:
        """A rollback takes the steps away that it has undone: the file holds one curve."""
        if record.back is not None and not self.waiting:
            self.file.close()
            try:
                trim(self.path, record.back, sys.maxsize)  # its own, however long: the run goes on
            finally:
                self.file = self._open()
        self.on_step(record)

    def _write(self) -> None:
        if not self._in_place():
            gone, self.file = self.file, self._open()
            gone.close()
            self.lost, self.written, self.why = self.lost + self.written, 0, "it was deleted"
            self.say(f"{self.path} was deleted or moved away; a new one has the records from here on")
        while self.waiting:
            done = self.file.write(self.waiting)
            self.written += self.waiting.count(b"\n", 0, done)
            self.waiting = self.waiting[done:]

    def _in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Try once more."""
        with suppress(OSError):
            self._write()
        self.file.close()
        self.lost += self.waiting.count(b"\n")
