"""What a person sees of a run: a live panel on a terminal, plain lines elsewhere, and a summary at the end."""

import time
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fivefold.support.formatting import bytes_text, si
from fivefold.train.chart import chart
from fivefold.train.records import Evaluation, Step


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
            self.live.update(Group(self._progress(record), _numbers(record, self.held_out), *self.curve()))
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


def _numbers(record: Step, held_out: Evaluation | None) -> Text:
    text = _line(record)
    return Text(text + (f"  held-out {held_out.held_out_loss:.3f}" if held_out else ""))


def _line(record: Step) -> str:
    mfu = f"  MFU {record.mfu:.1%}" if record.mfu is not None else ""
    return (
        f"loss {record.loss:.3f}  grad norm {record.grad_norm:.2f}  lr {record.lr:.2e}  "
        f"{si(record.tokens_per_second)} tokens/s{mfu}  memory {bytes_text(record.memory)}"
    )
