"""`python -m benchmarks.pipeline`: each schedule against its ideal, and against torch.distributed.pipelining, in turns.

measure(Shape(pp=2, microbatches=8, hidden=384, layers=8, seq=256, batch=8, rounds=7))

The ideal of a schedule is one process's time shared evenly by the ranks, plus the schedule's own bubble: time / p /
(1 - bubble). The bubble is the simulator's, for the median durations that every stage's F, I, W and B have on these
ranks when none of them waits for a message. One process is timed on all ranks at once, so that cores share caches and
memory as they do in a pipeline.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

from fivefold.bench.harness import caveats, ratio, refuse, table, too_small
from fivefold.job.config import DataConfig, Job, TrainConfig
from fivefold.launch import processes
from fivefold.layout.layout import Layout
from fivefold.render.blocks import Block, Result, Text
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError

# Ours, and the name that torch.distributed.pipelining has for it.
SCHEDULES = {"1f1b": "Schedule1F1B", "zb-h1": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble"}
TOLERANCE = 1e-4  # gradients of all systems must agree to this, in float32
_HEAD = 64  # features of an attention head
_VOCABULARY = 512  # small: the head is a layer that no split can balance


@dataclass(frozen=True)
class PipelineShape:
    pp: int
    microbatches: int
    hidden: int
    layers: int
    seq: int
    batch: int
    rounds: int

    @property
    def spec(self) -> ModelSpec:
        heads = max(1, self.hidden // _HEAD)
        return ModelSpec(name="this model", layers=self.layers, hidden=self.hidden, heads=heads, vocab=_VOCABULARY)

    def job(self, schedule: str | None) -> Job:
        """Under a schedule, or in one process."""
        layout = Layout(pp=self.pp if schedule else 1, schedule=schedule or "1f1b", microbatches=self.microbatches)
        data, train = DataConfig(seq=self.seq), TrainConfig(batch=self.batch, device="cpu")
        return Job(model=self.spec, layout=layout, data=data, train=train)

    def check(self) -> None:
        found = too_small(rounds=self.rounds, seq=self.seq, batch=self.batch)
        found += [f"--pp {self.pp} is no pipeline; nearest: --pp 2"] if self.pp < 2 else []
        have = tuple(map(int, version("torch").split(".")[:2]))
        if have < (2, 13):
            found.append(
                f"this compares with torch.distributed.pipelining, whose V schedules cannot run over gloo before torch "
                f"2.13, and torch is {have[0]}.{have[1]}; nearest: torch 2.13"
            )
        refuse([*found, *self.spec.problems()])
        layouts = [self.job(name).layout for name in SCHEDULES]
        refuse(list(dict.fromkeys(one for it in layouts for one in it.problems(self.spec, batch=self.batch))))
        m, rounds = self.microbatches, max(1, self.microbatches // self.pp)  # as torch's interleaved zero bubble counts
        if m % rounds:
            reason = f"torch's zero bubble divides {m} microbatches into {rounds} equal rounds, and cannot"
            raise UserError(f"{reason}; nearest: --microbatches {m // self.pp * self.pp}")


COLUMNS = {
    "schedule": "schedule", ">seconds": "seconds:.3f", ">bubble": "bubble:.1%", ">ideal": "ideal:.3f",
    ">of ideal": "share:.1%", ">torch": "torch:.3f", ">ours/torch": "ratio:.3f", ">to 1f1b": "to_1f1b:.3f",
}  # fmt: skip


@dataclass(frozen=True)
class PipelineResult(Result):
    """Seconds of every round, by system, in the order they were taken; a round holds one step of each."""

    shape: PipelineShape
    alone: list[float]
    ours: dict[str, list[float]]
    torch: dict[str, list[float]]
    bubbles: dict[str, float]  # of the simulated schedules, as shares of their makespans
    errors: dict[str, float]  # max|a-b| / max|b| over all gradients, against one process
    cores: int
    version: str  # of torch

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return max(self.errors.values()) <= TOLERANCE

    def rows(self) -> list[dict[str, Any]]:
        """One for each schedule. Ratios are medians of each round's own; `share` is of the ideal: 1 is its speed."""
        return [self._row(name) for name in self.ours]

    def _row(self, name: str) -> dict[str, Any]:
        bubble, times, torchs = self.bubbles[name], self.ours[name], self.torch[name]
        ideals = [alone / self.shape.pp / (1 - bubble) for alone in self.alone]
        return {
            "schedule": name,
            "seconds": median(times),
            "bubble": bubble,
            "ideal": median(ideals),
            "share": ratio(ideals, times),
            "torch": median(torchs),
            "ratio": ratio(times, torchs),
            "to_1f1b": ratio(times, self.ours["1f1b"]),
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"schedules": self.rows(), "agree": self.ok}

    def blocks(self) -> Iterator[Block]:
        shape = self.shape
        yield Text(
            f"pp={shape.pp}, {shape.layers} layers of {shape.hidden} ({shape.spec.parameter_count / 1e6:.1f}M "
            f"parameters), {shape.microbatches} microbatches of {shape.batch // shape.microbatches} x {shape.seq} "
            f"tokens, float32\ntorch {self.version}; {self.cores} cores, one thread a rank; one process: "
            f"{median(self.alone):.2f} s a step; {shape.rounds} rounds in turns, medians"
        )
        yield table(self.rows(), COLUMNS)
        worst = max(self.errors, key=self.errors.__getitem__)
        far = f"with one process; the farthest, {worst}, by {self.errors[worst]:.1e}"
        yield Text(f"gradients agree {far}", "good") if self.ok else Text(f"gradients differ {far}", "bad")
        fastest = ", ".join(f"{name} {min(one):.3f} / {min(self.torch[name]):.3f}" for name, one in self.ours.items())
        yield Text(f"fastest rounds, ours / torch's: {fastest}; one process {min(self.alone):.3f}")
        times = [self.alone, *self.ours.values(), *self.torch.values()]
        yield from caveats(times, shape.rounds, shape.pp, self.cores)


def measure(shape: PipelineShape, timeout: float = 3600.0) -> PipelineResult:
    shape.check()
    found: PipelineResult = processes.run(shape.pp, "fivefold.bench.pipeline_rank:run", shape, timeout=timeout)[0]
    return found
