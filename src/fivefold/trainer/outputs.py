"""The files that rank 0 writes besides checkpoints: the job, the environment, metrics, the trace; and its listeners.

A file that cannot be written before the first step ends the run with an error. Later on training continues: a note is
printed once, and a run whose files are not complete ends with exit code 1.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fivefold.job.config import Job
from fivefold.job.listeners import ListenerLost, RunListener
from fivefold.job.named_listeners import LISTENERS
from fivefold.job.toml_writer import to_toml
from fivefold.support.errors import Problem, TrainingError, UserError
from fivefold.support.files import cannot_write, put
from fivefold.support.text import bytes_text, plural, si
from fivefold.tracing.records import Trace
from fivefold.tracing.result import TraceFile
from fivefold.trainer.records import (
    DIGESTS_FILE,
    METRICS_FILE,
    Digests,
    Evaluation,
    MetricsFile,
    Step,
    StepDecision,
    trim,
)
from fivefold.trainer.run_names import read_run_names, write_run_names

Say = Callable[[str], None]


class Outputs:
    """Writes a run's files in its `directory`. `done`: the steps before the first that will be written."""

    def __init__(self, directory: Path, job: Job, environment: Mapping[str, object], done: int, say: Say):
        self.directory, self.say = directory, say
        self.lost: list[str] = []  # a sentence for each file that could not be written
        self.done = done
        self.listeners: dict[str, RunListener] = {}  # that have raised nothing
        self.run_names = read_run_names(directory) or []
        self.description = {"job.toml": to_toml(job), "environment.json": json.dumps(environment, indent=2) + "\n"}
        for name in _other_plugins(directory / "environment.json", environment):
            say(f"the code of {name} is not what it was when this run last started")
        self.traced = TraceFile(directory / "trace.json")
        metrics = directory / METRICS_FILE
        try:
            self.handle = os.open(directory, os.O_RDONLY)  # while it is open, no other directory gets its inode number
            self.describe()
            self.earlier, damaged = trim(metrics, done)
            self.metrics = MetricsFile(metrics, say)
            # Also where none are asked for now, since what is undone is no longer true; and however long they are.
            trim(directory / DIGESTS_FILE, done, sys.maxsize)
            self.digests = MetricsFile(directory / DIGESTS_FILE, say) if job.train.digest else None
        except OSError as error:
            raise cannot_write(Path(error.filename or directory), error) from None
        for name in job.run.heard:
            self._begin(name, job)
        if damaged:
            say(f"{metrics}: {plural(damaged, 'line')}, damaged or half written, left out")

    def _begin(self, name: str, job: Job) -> None:
        """Tells a listener of the start. What it raises ends the run before the first step, unless it says that the run
        can do without it."""
        try:
            listener = LISTENERS.named(name, trusted=False)()
            listener.start(job, self.directory, self.done)
        except ListenerLost as error:
            self._lose(name, "start", error)
            return
        except (Exception, SystemExit) as error:
            raise UserError(
                Problem("run.listeners.raised", f"{LISTENERS.setting}: {_listener_error(name, 'start', error)}")
            ) from None
        self.listeners[name] = listener

    def _lose(self, name: str, event: str, error: BaseException) -> None:
        self.lost.append(_listener_error(name, event, error))
        self.say(f"{self.lost[-1]}; training continues without it")

    def tell(self, event: str, *what: object) -> None:
        """All listeners. One that raises is told no more, and the run says so; training goes on as it would have."""
        for name, listener in [*self.listeners.items()]:
            try:
                getattr(listener, event)(*what)
            except (Exception, SystemExit) as error:
                del self.listeners[name]
                self._lose(name, event, error)

    def describe(self) -> None:
        for name, text in self.description.items():
            put(self.directory / name, text)

    @property
    def gone(self) -> bool:
        """Whether the directory was deleted or moved away; another one of its name is not this run's."""
        try:
            return not os.path.samestat(os.stat(self.directory), os.fstat(self.handle))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def vanished(self) -> bool:
        """Whether the directory is gone. If so, makes a new one, for the last checkpoint and for the next start."""
        if self.gone:
            with suppress(OSError, UserError):
                self.directory.mkdir(parents=True, exist_ok=True)
                self.describe()
                write_run_names(self.directory, self.run_names)
        return self.gone

    def keep(self, name: str | Path, write: Callable[[], object]) -> None:
        """Calls `write`; if it fails, prints a note with the file's name, and training continues."""
        try:
            write()
        except OSError as error:
            self.lost.append(f"{name} cannot be written: {error.strerror or error}")
            self.say(f"{self.lost[-1]}; training continues without it")

    def on_step(self, record: Step) -> None:
        self.done = record.step
        self.metrics.on_step(record)
        self.tell("step", record)

    def on_digests(self, record: Digests) -> None:
        if self.digests is not None:
            self.digests.on_step(record)

    def on_evaluation(self, record: Evaluation) -> None:
        self.metrics.on_evaluation(record)
        self.tell("evaluation", record)

    def on_decision(self, record: StepDecision) -> None:
        self.done = record.place
        for file in self._records:
            self.keep(file.path, partial(file.on_decision, record))
        self.tell("decision", record)

    def on_checkpoint(self, step: int) -> None:
        self.tell("checkpoint", step)

    def trace(self, trace: Trace) -> None:
        self.keep(self.traced.path, lambda: self.traced(trace))

    @property
    def _records(self) -> list[MetricsFile]:
        return [self.metrics, *([self.digests] if self.digests is not None else [])]

    def close(self) -> None:
        for file in self._records:
            file.close()
        self.tell("end", self.done)
        for file in self._records:
            if file.lost:
                self.lost.append(f"{plural(file.lost, 'record')} of {file.path} could not be kept: {file.why}")

    def check(self) -> None:
        """Raises TrainingError, after the last step, if files are missing."""
        if self.gone:
            raise vanishing(self.directory)
        if self.lost:
            raise TrainingError(f"all steps are done, but {'; '.join(self.lost)}")


def _listener_error(name: str, event: str, error: BaseException) -> str:
    """What a listener could not do."""
    if isinstance(error, ListenerLost):
        return str(error)
    if name == "tensorboard" and isinstance(error, OSError):
        return f"TensorBoard's file cannot be written: {error.strerror or error}"
    return f"the listener {name} raised {type(error).__name__} in {event}: {error}"


def vanishing(directory: Path) -> TrainingError:
    return TrainingError(
        f"{directory} was deleted or moved away during the run; a new one has the last checkpoint, unless "
        "checkpoint.save=false, and the same command resumes from it"
    )


# ---- display --------------------------------------------------------------------------------------------------------
# The output of a run: a live panel on a terminal, plain lines elsewhere, and a summary at the end.


_BRAILLE_BITS = (
    (0x01, 0x02, 0x04, 0x40),
    (0x08, 0x10, 0x20, 0x80),
)  # bits of a braille character's dots, by column and row


class Display:
    """Prints the progress of a run of `steps`; `marks` are losses to compare with (the entropies of the corpus).

    `earlier` are the steps before the first one of this process.
    """

    def __init__(
        self, console: Console, steps: int, marks: dict[str, float], log_every: int, earlier: Sequence[Step] = ()
    ):
        self.console, self.steps, self.marks, self.log_every = console, steps, marks, log_every
        self.losses = [record.loss for record in earlier]
        self.step_numbers = [record.step for record in earlier]
        self.new_steps = 0
        self.held_out: Evaluation | None = None
        self.start = time.monotonic()
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        if self.live:
            self.live.start()

    def on_step(self, record: Step) -> None:
        self.losses.append(record.loss)
        self.step_numbers.append(record.step)
        self.new_steps += 1
        if self.live:
            held_out = f"  held-out {self.held_out.held_out_loss:.3f}" if self.held_out else ""
            left = (time.monotonic() - self.start) / self.new_steps * (self.steps - record.step)
            progress = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=self.steps, completed=record.step, width=48)
            progress.add_row(bar, f"step {record.step}/{self.steps}", f"[dim]{left:.0f} s left[/]")
            self.live.update(Group(progress, Text(_line(record) + held_out), *self.curve()))
        elif self.new_steps == 1 or record.step % self.log_every == 0 or record.step == self.steps:
            self.console.print(
                f"step {record.step:>{len(str(self.steps))}}/{self.steps}  {_line(record)}", soft_wrap=True
            )

    def on_evaluation(self, record: Evaluation) -> None:
        self.held_out = record
        if not self.live:
            self.console.print(f"held-out loss {record.held_out_loss:.4f} after step {record.step}")

    def on_decision(self, record: StepDecision) -> None:
        """Removes the steps that a rollback undid from the curve; the run itself prints the decision."""
        while self.step_numbers and self.step_numbers[-1] > record.place:
            del self.losses[-1], self.step_numbers[-1]

    def close(self) -> None:
        if self.live:
            self.live.stop()

    def curve(self) -> Iterable[Text]:
        """The losses so far as a curve; nothing where the terminal cannot print braille."""
        if sum(loss is not None for loss in self.losses) < 2 or not self.console.encoding.lower().startswith("utf"):
            return []
        width = max(20, min(72, self.console.width - 20))
        return [Text(row, style="cyan") for row in chart(self.losses, self.marks, width)]


def _line(record: Step) -> str:
    mfu = f"  MFU {record.mfu:.1%}" if record.mfu is not None else ""
    load = f"  fullest expert {record.load.fullest:.2f}x" if record.load is not None else ""
    loss = "no loss" if record.loss is None else f"loss {record.loss:.3f}"
    return (
        f"{loss}  grad norm {record.grad_norm:.2f}  lr {record.lr:.2e}  "
        f"{si(record.tokens_per_second)} tokens/s{mfu}{load}  memory {bytes_text(record.memory)}"
    )


def drawable(values: Sequence[float | None]) -> list[float | None]:
    """The values, clamped to what can be drawn: a file of an earlier release may have any number in it."""
    return [None if value is None else max(-1e30, min(1e30, value)) for value in values]


def chart(
    values: Sequence[float | None],
    marks: dict[str, float],
    width: int = 64,
    height: int = 10,
    others: Sequence[float | None] = (),
) -> list[str]:
    """The curve of `values` in braille, with a dashed line and a label at each mark, as rows of text from the top.

    Where a value is None the curve has a gap. `others` are a second curve on the same scale.
    """
    curves = [drawable(values), *([drawable(others)] if others else [])]
    known = [*(value for curve in curves for value in curve if value is not None), *marks.values()]
    top, bottom = max(known), min(known)
    span = (top - bottom) or 1.0

    def row_of(value: float, rows: int) -> int:
        return round((top - value) / span * (rows - 1))

    cells = [[0] * width for _ in range(height)]
    previous_y = None
    for curve, x in product(curves, range(2 * width)):  # a braille cell has two columns and four rows of dots
        start, stop = x * len(curve) // (2 * width), (x + 1) * len(curve) // (2 * width)
        # The values of this column of dots; the nearest value where there is none.
        in_column = [value for value in curve[start : max(stop, start + 1)] if value is not None]
        if not in_column or x == 0:
            previous_y = None
        if not in_column:
            continue
        y = row_of(sum(in_column) / len(in_column), 4 * height)
        ends = (y, y if previous_y is None else previous_y)
        for dot in range(min(ends), max(ends) + 1):  # dots up to the previous point, so that a steep fall is a line
            cells[dot // 4][x // 2] |= _BRAILLE_BITS[x % 2][dot % 4]
        previous_y = y
    labels = {0: f"{top:.2f}", height - 1: f"{bottom:.2f}"}
    dashed: dict[int, str] = {}
    for name, value in marks.items():
        row = row_of(value, height)
        labels[row], dashed[row] = f"{value:.2f}", f" {name}"
    lines = []
    for y, row_cells in enumerate(cells):
        line = "".join(chr(0x2800 + cell) if cell else "╌" if y in dashed else " " for cell in row_cells)
        lines.append(f"{labels.get(y, ''):>6} {'┼' if y in labels else '│'}{line}{dashed.get(y, '')}")
    return lines


def _other_plugins(file: Path, environment: Mapping[str, object]) -> list[str]:
    """Plugins whose source differs from that of the run's start before; what cannot be read of it says nothing."""
    try:
        before, now = (json.loads(text)["plugins"] for text in (file.read_text(), json.dumps(environment)))
        return [name for name, source in now.items() if before.get(name, source) != source]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []
