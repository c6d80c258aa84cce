"""The pipeline's speed: each schedule against its ideal, and against torch.distributed.pipelining, in one run.

measure(Shape(pp=2, microbatches=8, hidden=384, layers=8, seq=256, batch=8, rounds=7))

The ideal of a schedule is one process's time shared evenly by the ranks, plus the schedule's own bubble: time / p /
(1 - bubble). The bubble is the simulator's, for the median durations that every stage's F, I, W and B have on these
ranks when none of them waits for a message. One process is timed on all ranks at once, so that cores share caches and
memory as they do in a pipeline.
"""

from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from fivefold.launch import ranks
from fivefold.layout.layout import Layout
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError

# Ours, and the name that torch.distributed.pipelining has for it.
SCHEDULES = {"1f1b": "Schedule1F1B", "zb-h1": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble"}
ASKED = 1e-4  # gradients of all contenders must agree to this, in float32
_HEAD = 64  # features of an attention head
_VOCABULARY = 512  # small: the head is a layer that no split can balance


@dataclass(frozen=True)
class Shape:
    """What is measured."""

    pp: int
    microbatches: int
    hidden: int
    layers: int
    seq: int
    batch: int
    rounds: int

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            name="this model",
            layers=self.layers,
            hidden=self.hidden,
            heads=max(1, self.hidden // _HEAD),
            vocab=_VOCABULARY,
        )

    def layout(self, schedule: str) -> Layout:
        return Layout(pp=self.pp, schedule=schedule, microbatches=self.microbatches)

    def check(self) -> None:
        """Every problem at once, before any process starts."""
        found = [f"--rounds {self.rounds} must be at least 1"] if self.rounds < 1 else []
        found += [f"--seq {self.seq} must be at least 1"] if self.seq < 1 else []
        found += [f"--pp {self.pp} is no pipeline; nearest: --pp 2"] if self.pp < 2 else []
        if (have := _torch()) < (2, 13):
            found.append(
                f"this compares with torch.distributed.pipelining, whose V schedules cannot run over gloo before torch "
                f"2.13, and torch is {have[0]}.{have[1]}; nearest: torch 2.13"
            )
        found += self.spec.problems()
        if not found:
            seen = [one for name in SCHEDULES for one in self.layout(name).problems(self.spec, batch=self.batch)]
            found = list(dict.fromkeys(seen))
        rounds = max(1, self.microbatches // max(1, self.pp))  # as torch's interleaved zero bubble counts them
        if not found and self.microbatches % rounds:
            found = [
                f"torch's zero bubble deals {self.microbatches} microbatches out in {rounds} equal rounds, and cannot; "
                f"nearest: --microbatches {self.microbatches // self.pp * self.pp}"
            ]
        if found:
            raise UserError(found)


def _torch() -> tuple[int, int]:
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Result:
    """Seconds of every round, by contender, in the order they were taken; a round holds one step of each."""

    alone: list[float]
    ours: dict[str, list[float]]
    torch: dict[str, list[float]]
    bubbles: dict[str, float]  # of the simulated schedules, as shares of their makespans
    errors: dict[str, float]  # max|a-b| / max|b| over all gradients, against one process
    cores: int
    version: str  # of torch


@dataclass(frozen=True)
class Row:
    """One schedule's line. Ratios are medians over rounds, so that both sides of one have met the same noise."""

    schedule: str
    seconds: float
    bubble: float
    ideal: float
    share: float  # of the ideal: 1 is as fast as can be
    torch: float
    ratio: float  # ours / torch's
    to_1f1b: float  # ours / our 1f1b


def measure(shape: Shape, timeout: float = 3600.0) -> Result:
    shape.check()
    return ranks.run(shape.pp, "fivefold.bench.pipeline_rank:run", shape, timeout=timeout)[0]


def rows(shape: Shape, result: Result) -> list[Row]:
    found = []
    for name, times in result.ours.items():
        bubble = result.bubbles[name]
        ideals = [alone / shape.pp / (1 - bubble) for alone in result.alone]
        found.append(
            Row(
                schedule=name,
                seconds=median(times),
                bubble=bubble,
                ideal=median(ideals),
                share=_ratio(ideals, times),
                torch=median(result.torch[name]),
                ratio=_ratio(times, result.torch[name]),
                to_1f1b=_ratio(times, result.ours["1f1b"]),
            )
        )
    return found


def _ratio(ours: list[float], others: list[float]) -> float:
    return median(mine / other for mine, other in zip(ours, others, strict=True))


def agree(result: Result) -> bool:
    return max(result.errors.values()) <= ASKED


def as_json(shape: Shape, result: Result) -> dict[str, Any]:
    lines = [asdict(row) for row in rows(shape, result)]
    return {"shape": asdict(shape), **asdict(result), "schedules": lines, "agree": agree(result)}


def report(console: Console, shape: Shape, result: Result) -> None:
    spec = shape.spec
    console.print(
        f"pp={shape.pp}, {shape.layers} layers of {shape.hidden} ({spec.parameter_count / 1e6:.1f}M parameters), "
        f"{shape.microbatches} microbatches of {shape.batch // shape.microbatches} x {shape.seq} tokens, float32"
    )
    console.print(
        f"torch {result.version}; {result.cores} cores, one thread a rank; one process: {median(result.alone):.2f} s a "
        f"step; {shape.rounds} rounds in turns, medians"
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("schedule", "seconds", "bubble", "ideal", "of ideal", "torch", "ours/torch", "to 1f1b"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for row in rows(shape, result):
        table.add_row(
            row.schedule,
            f"{row.seconds:.3f}",
            f"{row.bubble:.1%}",
            f"{row.ideal:.3f}",
            f"{row.share:.1%}",
            f"{row.torch:.3f}",
            f"{row.ratio:.3f}",
            f"{row.to_1f1b:.3f}",
        )
    console.print(table)
    worst = max(result.errors, key=lambda name: result.errors[name])
    how = "[green]agree[/]" if agree(result) else "[red]differ[/]"
    console.print(f"gradients {how} with one process; the farthest, {worst}, by {result.errors[worst]:.1e}")
    console.print(_noise(result))
    if shape.pp > result.cores:
        console.print(f"{shape.pp} ranks share {result.cores} cores: the ideal cannot be reached here")


def _noise(result: Result) -> str:
    """What a machine with other things to do would hide: how far rounds lie apart, and the fastest of each."""
    times = [result.alone, *result.ours.values(), *result.torch.values()]
    spread = max(max(one) / min(one) for one in times)
    fastest = ", ".join(f"{name} {min(one):.3f} / {min(result.torch[name]):.3f}" for name, one in result.ours.items())
    return (
        f"noise: slowest rounds take up to {spread:.2f} times the fastest; ratios are medians of each round's own\n"
        f"fastest rounds, ours / torch's: {fastest}; one process {min(result.alone):.3f}"
    )
