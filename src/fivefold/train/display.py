"""What a person sees of a run: a live panel on a terminal, plain lines elsewhere, and a summary at the end."""

import time
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fivefold.support.formatting import bytes_text, si
from fivefold.train.records import Evaluation, Step

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille cell, by column and row


class Display:
    """Follows a run of `steps`; `marks` are losses to compare with (the entropies of the corpus).

    `earlier` are the steps before the one that this process begins with.
    """

    def __init__(
        self, console: Console, steps: int, marks: dict[str, float], log_every: int, earlier: Sequence[Step] = ()
    ):
        self.console, self.steps, self.marks, self.log_every = console, steps, marks, log_every
        self.losses = [record.loss for record in earlier]
        self.steps_here = 0
        self.held_out: Evaluation | None = None
        self.start = time.monotonic()
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        if self.live:
            self.live.start()

    def on_step(self, record: Step) -> None:
        self.losses.append(record.loss)
        self.steps_here += 1
        if self.live:
            held_out = f"  held-out {self.held_out.held_out_loss:.3f}" if self.held_out else ""
            self.live.update(Group(self._progress(record), Text(_line(record) + held_out), *self.curve()))
        elif self.steps_here == 1 or record.step % self.log_every == 0 or record.step == self.steps:
            self.console.print(
                f"step {record.step:>{len(str(self.steps))}}/{self.steps}  {_line(record)}", soft_wrap=True
            )

    def on_evaluation(self, record: Evaluation) -> None:
        self.held_out = record
        if not self.live:
            self.console.print(f"held-out loss {record.held_out_loss:.4f} after step {record.step}")

    def close(self) -> None:
        if self.live:
            self.live.stop()

    def curve(self) -> Iterable[Text]:
        """The loss so far; nothing where the terminal has no braille."""
        if len(self.losses) < 2 or not self.console.encoding.lower().startswith("utf"):
            return []
        width = max(20, min(72, self.console.width - 20))
        return [Text(row, style="cyan") for row in chart(self.losses, self.marks, width)]

    def _progress(self, record: Step) -> RenderableType:
        done = record.step
        left = (time.monotonic() - self.start) / self.steps_here * (self.steps - done)
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self.steps, completed=done, width=48)
        grid.add_row(bar, f"step {done}/{self.steps}", f"[dim]{left:.0f} s left[/]")
        return grid


def _line(record: Step) -> str:
    mfu = f"  MFU {record.mfu:.1%}" if record.mfu is not None else ""
    return (
        f"loss {record.loss:.3f}  grad norm {record.grad_norm:.2f}  lr {record.lr:.2e}  "
        f"{si(record.tokens_per_second)} tokens/s{mfu}  memory {bytes_text(record.memory)}"
    )


def chart(values: Sequence[float], marks: dict[str, float], width: int = 64, height: int = 10) -> list[str]:
    """The curve of `values` in braille, two points a column and four a row, with a dashed line and a label at each mark.

    Returns rows of text, top first.
    """
    top, bottom = max(*values, *marks.values()), min(*values, *marks.values())
    span = (top - bottom) or 1.0

    def row_of(value: float, rows: int) -> int:
        return round((top - value) / span * (rows - 1))

    cells = [[0] * width for _ in range(height)]
    points = [_mean_between(values, i, 2 * width) for i in range(2 * width)]
    for x, value in enumerate(points):
        y = row_of(value, 4 * height)
        before = row_of(points[x - 1], 4 * height) if x else y
        for dot in range(min(y, before), max(y, before) + 1):  # join the points, so that a steep fall is a line
            cells[dot // 4][x // 2] |= _DOTS[x % 2][dot % 4]
    labels = {0: f"{top:.2f}", height - 1: f"{bottom:.2f}"}
    dashed: dict[int, str] = {}
    for name, value in marks.items():
        row = row_of(value, height)
        labels[row], dashed[row] = f"{value:.2f}", name
    return [_row(cells[y], labels.get(y, ""), dashed.get(y)) for y in range(height)]


def _mean_between(values: Sequence[float], point: int, points: int) -> float:
    """The mean of the share of `values` that falls on one of `points` places; its nearest where none does."""
    start, stop = point * len(values) // points, (point + 1) * len(values) // points
    share = values[start : max(stop, start + 1)]
    return sum(share) / len(share)


def _row(cells: list[int], label: str, mark: str | None) -> str:
    empty = "╌" if mark else " "
    line = "".join(chr(0x2800 + cell) if cell else empty for cell in cells)
    return f"{label:>6} {'┼' if label else '│'}{line}{' ' + mark if mark else ''}"
