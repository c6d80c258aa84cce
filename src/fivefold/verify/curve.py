"""A run's loss curve under a layout, against the same run in one process.

Two runs that add the same numbers in another order drift apart, and in float32 the drift grows from step to step. How
far is too far? A third run says: the single process once more, with the samples of every batch in another order, which
changes nothing but the order of additions. A layout may stray `ALLOWED` times as far as that control; and always by a
few roundings of the loss itself, since a short run's control can happen to agree to the bit.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from fivefold.job.config import Job
from fivefold.launch import ranks
from fivefold.layout.layout import Layout

ALLOWED = 3.0


@dataclass(frozen=True)
class Curves:
    """Losses by step."""

    layout: Layout
    alone: list[float]
    control: list[float]
    spread: list[float]
    same_start: bool  # the layout began with the very bits of the single process
    rounding: float  # of the dtype: the distance from 1 to the next number

    @property
    def noise(self) -> float:
        return max(abs(a - b) for a, b in zip(self.alone, self.control, strict=True))

    @property
    def distance(self) -> float:
        return max(abs(a - b) for a, b in zip(self.alone, self.spread, strict=True))

    @property
    def allowed(self) -> float:
        return ALLOWED * max(self.noise, 4 * self.rounding * max(map(abs, self.alone)))

    @property
    def passed(self) -> bool:
        return self.same_start and self.distance <= self.allowed


def follow(job: Job, timeout: float) -> Curves:
    """Three runs, one after the other: alone, its control, and the job's own layout."""
    layout = job.layout
    alone = Layout(microbatches=layout.size("batch") * layout.microbatches, recompute=layout.recompute)
    single = msgspec.structs.replace(job, layout=alone)

    def run(which: Job, shuffled: bool) -> tuple[list[float], set[tuple[str, str]]]:
        found = ranks.run(which.layout.world, "fivefold.verify.curve_rank:run", which, shuffled, timeout=timeout)
        return found[0][0], {one for _, weights in found for one in weights.items()}  # ranks have their own stages

    (a, start), (b, _), (c, other) = run(single, False), run(single, True), run(job, False)
    rounding = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}[job.train.dtype]
    return Curves(layout, a, b, c, same_start=start == other, rounding=rounding)


def rows(curves: Curves) -> dict[str, Any]:
    return {
        "passed": curves.passed,
        "layout": str(curves.layout),
        "same_start": curves.same_start,
        "noise": curves.noise,
        "distance": curves.distance,
        "allowed": curves.allowed,
        "losses": {"alone": curves.alone, "control": curves.control, "layout": curves.spread},
    }


def report(console: Console, curves: Curves) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("step", "one process", "control", str(curves.layout), "|control - one|", "|layout - one|"):
        table.add_column(heading, justify="right")
    steps = len(curves.alone)
    shown = sorted({1, steps, *range(10, steps, max(1, steps // 10))})
    for step in shown:
        a, b, c = (losses[step - 1] for losses in (curves.alone, curves.control, curves.spread))
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{c:.6f}", f"{abs(b - a):.1e}", f"{abs(c - a):.1e}")
    console.print(table)
    console.print(
        "initial weights: "
        + ("the same bits in both" if curves.same_start else "[bold red]not the same bits[/] in both")
        + f"\nlargest distance over {steps} steps: control {curves.noise:.1e}, layout {curves.distance:.1e}, allowed "
        f"{curves.allowed:.1e}: " + ("[green]follows[/]" if curves.passed else "[bold red]strays[/]")
    )
