"""A run's loss curve under a layout, compared with the same run in one process.

Two runs that add the same numbers in another order drift apart, and in float32 the drift grows from step to step. A
third run says how far is too far: the single process again, with the samples of every batch in another order, which
changes nothing but the order of additions. A layout may stray `ALLOWED` times as far as that control. It may always
stray by a few roundings of the loss itself, since the control of a short run can happen to agree to the bit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fivefold.job.config import Job, read_job
from fivefold.job.preflight import preflight
from fivefold.launch import ranks
from fivefold.layout.layout import Layout
from fivefold.plan.cost.memory import proof_problems
from fivefold.report import Block, Result, Table, Text
from fivefold.support.errors import UserError

ALLOWED = 3.0


@dataclass(frozen=True)
class CurveResult(Result):
    """Losses by step; None where no target carries loss, alike in all three."""

    layout: Layout
    alone: list[float | None]
    control: list[float | None]
    spread: list[float | None]
    same_start: bool  # the layout began with the very bits of the single process
    rounding: float  # of the dtype: the distance from 1 to the next number

    @property
    def noise(self) -> float:
        return _apart(self.alone, self.control)

    @property
    def distance(self) -> float:
        return _apart(self.alone, self.spread)

    @property
    def allowed(self) -> float:
        return ALLOWED * max(self.noise, 4 * self.rounding * max(abs(one or 0.0) for one in self.alone))

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return self.same_start and self.distance <= self.allowed

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.ok,
            "layout": str(self.layout),
            "same_start": self.same_start,
            "noise": self.noise,
            "distance": self.distance,
            "allowed": self.allowed,
            "losses": {"alone": self.alone, "control": self.control, "layout": self.spread},
        }

    def blocks(self) -> Iterator[Block]:
        steps = len(self.alone)
        rows = []
        for step in sorted({1, steps, *range(10, steps, max(1, steps // 10))}):
            a, b, c = (losses[step - 1] for losses in (self.alone, self.control, self.spread))
            if a is None or b is None or c is None:
                rows.append([str(step), *("none" if one is None else f"{one:.6f}" for one in (a, b, c)), "", ""])
                continue
            rows.append([str(step), f"{a:.6f}", f"{b:.6f}", f"{c:.6f}", f"{abs(b - a):.1e}", f"{abs(c - a):.1e}"])
        heads = [">step", ">one process", ">control", ">layout", ">|control - one|", ">|layout - one|"]
        yield Table(heads, rows, title=f"loss of {self.layout}")
        yield Text(f"initial weights: {'' if self.same_start else 'not '}the same bits in both")
        yield Text(
            f"largest distance over {steps} steps: control {self.noise:.1e}, layout {self.distance:.1e}, allowed "
            f"{self.allowed:.1e}: {'follows' if self.ok else 'strays'}",
            "good" if self.ok else "bad",
        )


def _apart(some: Sequence[float | None], others: Sequence[float | None]) -> float:
    """The largest distance of two curves: without end where one has a loss and the other has none."""
    pairs = zip(some, others, strict=True)
    return max(
        abs(a - b) if a is not None and b is not None else 0.0 if a is None and b is None else math.inf
        for a, b in pairs
    )


def curve(job: str | Path | Job | None = None, changes: Sequence[str] = (), *, timeout: float = 3600.0) -> CurveResult:
    """Train a job under its layout and in one process, and compare the losses. `changes` are KEY=VALUE.

    ff.curve("examples/demo.toml", ["train.steps=20"])
    """
    resolved = job if isinstance(job, Job) else read_job(job and str(job), list(changes))
    preflight(resolved, resolved.layout.world)
    if problems := proof_problems(resolved):
        raise UserError(problems)
    return follow(resolved, timeout)


def follow(job: Job, timeout: float) -> CurveResult:
    """Three runs, one after the other: alone, its control, and the job's own layout."""
    layout = job.layout
    alone = Layout(microbatches=layout.size("batch") * layout.microbatches, recompute=layout.recompute)
    single = msgspec.structs.replace(job, layout=alone)

    def run(which: Job, shuffled: bool) -> tuple[list[float | None], set[tuple[str, str]]]:
        found = ranks.run(which.layout.world, "fivefold.verify.measure:curve", which, shuffled, timeout=timeout)
        return found[0][0], {one for _, weights in found for one in weights.items()}  # ranks have their own stages

    (a, start), (b, _), (c, other) = run(single, False), run(single, True), run(job, False)
    rounding = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}[job.train.dtype]
    return CurveResult(layout, a, b, c, same_start=start == other, rounding=rounding)
