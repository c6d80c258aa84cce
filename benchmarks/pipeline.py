"""`python -m benchmarks.pipeline`: each schedule against its ideal, and against torch.distributed.pipelining, in turns.

measure(PipelineShape(pp=2, microbatches=8, hidden=384, layers=8, seq=256, batch=8, rounds=7))

The ideal of a schedule is one process's time shared evenly by the ranks, plus the schedule's own bubble: time / p /
(1 - bubble). The bubble is the simulator's, for the median durations that every stage's F, I, W and B have on these
ranks when none of them waits for a message. One process is timed on all ranks at once, so that cores share caches and
memory as they do in a pipeline.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from fivefold.bench.baselines import TorchPipeline
from fivefold.bench.harness import caveats, ratio, refuse, table, too_small
from fivefold.bench.rank_timing import CPU, join_ranks, machine, take_turns
from fivefold.cli import main, program
from fivefold.cli.options import Json, Output
from fivefold.data.batch import Batch
from fivefold.data.shards import TokenShards
from fivefold.job.config import Job, TrainConfig
from fivefold.launch import processes
from fivefold.launch.processes import Rank
from fivefold.layout.layout import Layout
from fivefold.model.linear_cross_entropy import loss_sum
from fivefold.model.ops import LocalOps
from fivefold.parallel.collectives import full_tensor
from fivefold.parallel.control import all_gather_values
from fivefold.parallel.mesh import Mesh
from fivefold.render.blocks import Block, Result, Text, show
from fivefold.schedules.actions import Action, Kind
from fivefold.schedules.costs import Costs
from fivefold.schedules.simulate import simulate
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import plain_batch

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
        data, train = TokenShards(seq=self.seq), TrainConfig(batch=self.batch, device="cpu")
        return Job(model=self.spec, layout=layout, data=data, train=train)

    def check(self) -> None:
        problems = too_small(rounds=self.rounds, seq=self.seq, batch=self.batch)
        problems += [f"--pp {self.pp} is no pipeline; nearest: --pp 2"] if self.pp < 2 else []
        have = tuple(map(int, version("torch").split(".")[:2]))
        if have < (2, 13):
            problems.append(
                f"this compares with torch.distributed.pipelining, whose V schedules cannot run over gloo before torch "
                f"2.13, and torch is {have[0]}.{have[1]}; nearest: torch 2.13"
            )
        refuse([*problems, *self.spec.problems()])
        layouts = [self.job(name).layout for name in SCHEDULES]
        refuse(list(dict.fromkeys(why for layout in layouts for why in layout.problems(self.spec, batch=self.batch))))
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
        fastest = ", ".join(f"{name} {min(self.ours[name]):.3f} / {min(self.torch[name]):.3f}" for name in self.ours)
        yield Text(f"fastest rounds, ours / torch's: {fastest}; one process {min(self.alone):.3f}")
        all_times = [self.alone, *self.ours.values(), *self.torch.values()]
        yield from caveats(all_times, shape.rounds, shape.pp, self.cores)


def measure(shape: PipelineShape, timeout: float = 3600.0) -> PipelineResult:
    shape.check()
    result: PipelineResult = processes.run(shape.pp, "benchmarks.pipeline:run", shape, timeout=timeout)[0]
    return result


# ---- ranks ----------------------------------------------------------------------------------------------------------


ALONE = "one process"


class FivefoldPipeline:
    """An engine under one schedule; under none, one process with the whole model."""

    def __init__(self, shape: PipelineShape, batch: Batch, schedule: str | None = None):
        job = shape.job(schedule)
        self.timing = False
        # Seconds of compute on this rank, by kind and stage.
        self.durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        self.engine, self.batch = Engine(job, Mesh.of(job.layout, CPU, spec=job.model), self._watch), batch

    @contextmanager
    def _watch(self, action: Action) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.timing:
            self.durations[action.kind, action.stage].append(time.perf_counter() - start)

    def step(self) -> object:
        """Forward and backward passes of the batch, until its gradients are final."""
        return self.engine.forward_backward(self.batch)

    def gradients(self) -> dict[str, Tensor]:
        """Of this rank's stages, by global name."""
        return {name: full_tensor(grad) for name, grad in self.engine.gradients().items()}

    def reset(self) -> None:
        """Drop the gradients."""
        self.engine.weights.sync_params()

    def time_actions(self) -> None:
        """One step in which every rank computes as the schedule says, and none waits for another."""
        self.timing = True
        with self.engine.pipeline.without_messages():
            self.step()
        self.reset()
        self.timing = False

    def costs(self) -> Costs:
        """What compute costs on all ranks; collective."""
        local = [(kind, stage, times) for (kind, stage), times in self.durations.items()]
        by_rank = all_gather_values(local, list[tuple[Kind, int, list[float]]])
        known = {(kind, stage): seconds for rank in by_rank for kind, stage, seconds in rank}
        return Costs.measured(known, self.engine.schedule.placement.stages)


class TorchReference(TorchPipeline):
    """The schedule of the same name in torch.distributed.pipelining, with our loss."""

    def __init__(self, shape: PipelineShape, batch: Batch, schedule: str):
        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return loss_sum(logits, targets, torch.ones_like(targets, dtype=torch.bool))

        super().__init__(shape.job(schedule), batch, SCHEDULES[schedule], loss, LocalOps())

    def gradients(self) -> dict[str, Tensor]:
        return {name: param.grad for name, param in self.parameters.items() if param.grad is not None}

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)


def run(rank: Rank, shape: PipelineShape) -> PipelineResult:
    join_ranks(rank)
    batch = plain_batch(shape.spec.vocab, shape.batch, shape.seq)
    ours = {name: FivefoldPipeline(shape, batch, name) for name in SCHEDULES}
    systems: dict[str, FivefoldPipeline | TorchReference] = {ALONE: FivefoldPipeline(shape, batch)}
    for name in SCHEDULES:
        systems |= {name: ours[name], f"torch {name}": TorchReference(shape, batch, name)}
    errors = _errors(systems)

    def after(name: str) -> None:
        systems[name].reset()
        if name in ours:
            dist.barrier()
            ours[name].time_actions()

    seconds = take_turns({name: system.step for name, system in systems.items()}, shape.rounds, (ALONE,), after)
    here = machine()
    return PipelineResult(
        shape,
        alone=seconds[ALONE],
        ours={name: seconds[name] for name in SCHEDULES},
        torch={name: seconds[f"torch {name}"] for name in SCHEDULES},
        bubbles={name: simulate(own.engine.schedule, own.costs()).bubble_makespan for name, own in ours.items()},
        errors=errors,
        cores=here.cores,
        version=here.torch,
    )


def _errors(systems: dict[str, FivefoldPipeline | TorchReference]) -> dict[str, float]:
    """How far every system's gradients lie from one process's; the first step of each is also its warm-up."""
    systems[ALONE].step()
    wanted, errors = systems[ALONE].gradients(), {}
    for name, system in systems.items():
        if name != ALONE:
            dist.barrier()
            system.step()
            pairs = [(grad, wanted[key]) for key, grad in system.gradients().items()]
            worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
            over_ranks = torch.tensor(worst, dtype=torch.float64)
            dist.all_reduce(over_ranks, dist.ReduceOp.MAX)
            errors[name] = over_ranks.item()
            system.reset()
    systems[ALONE].reset()
    return errors


# ---- command --------------------------------------------------------------------------------------------------------


def pipeline(
    pp: Annotated[int, typer.Option(help="Ranks that share the layers.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Pieces of the batch.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 8,
    rounds: Annotated[int, typer.Option(help="Timed steps of each system, in turns.")] = 7,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time a step under 1f1b, zb-h1 and zb-v on real ranks.

    Each is compared with its ideal: one process's time, shared by the ranks, plus
    the schedule's own bubble, simulated from the durations of this machine. Each is
    also compared with torch.distributed.pipelining on the same stages. All take
    turns, one step each, and their gradients must agree. One rank has one thread.

    [dim]Examples:[/]

      python -m benchmarks.pipeline

      python -m benchmarks.pipeline --microbatches 4 --hidden 512 --rounds 15

      python -m benchmarks.pipeline --pp 4 --layers 16 --json
    """
    show(measure(PipelineShape(pp, microbatches, hidden, layers, seq, batch, rounds)), as_json=as_json, output=output)


app = program(pipeline)

if __name__ == "__main__":
    from benchmarks import pipeline as this_module  # by the name under which ranks unpickle its classes

    main(this_module.app)
