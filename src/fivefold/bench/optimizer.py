"""`fivefold bench optimizer`: the seconds of an update alone, by optimizer, next to a lower bound.

    measure(["small", "layout=dp=2,zero=1"], "adamw,muon,my_package.lion:Lion", rounds=9, on_progress=print).rows()

The ranks of the job's layout are started once. On them the optimizers take turns with the same masters and gradients,
each with its own states, so nothing differs but the update: no forward or backward pass, no norm, no gather of weights.

The bound is what the planner counts, at the paces that these ranks reach together: the bytes of masters, states and
gradients (`cost/closed_forms.py`) at the pace of a stream, and the FLOPs of whole matrices (`cost/matrices.py`) at
that of a large product. Messages are listed, and not in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import structs

from fivefold.bench.harness import Machine, OnProgress, RoundTimes, caveats, refuse, table, too_small
from fivefold.bench.train import read
from fivefold.cost.closed_forms import ZeroCost
from fivefold.cost.matrices import MatrixCost
from fivefold.cost.model_state import host_memory, memory_problems
from fivefold.cost.step import param_share
from fivefold.hardware.accelerators import find_accelerator
from fivefold.hardware.cluster import Cluster, Group
from fivefold.job.config import Job
from fivefold.launch import processes
from fivefold.layout.rank_part import RankCoords
from fivefold.optim import OPTIMIZERS
from fivefold.planner.plan import workload_of
from fivefold.render.blocks import Block, Result, Text
from fivefold.support.errors import UserError
from fivefold.support.text import bytes_text, plural, si

_TIMEOUT_S = 24 * 3600.0  # seconds: the user ends a measurement that takes too long
COLUMNS = {
    "~optimizer": "optimizer", ">ms": "ms:.1f", ">from": "from:.1f", ">to": "to:.1f", ">times": "times:.2f",
    ">moved": "moved", ">GFLOP": "gflop", ">sent": "sent", ">bound, ms": "bound:.1f", ">of it": "share:.0%",
}  # fmt: skip


class Paces(NamedTuple):
    """What every rank reaches while all work: the figures of the slowest."""

    bandwidth: float  # bytes/s of a stream
    rate: float  # FLOP/s of a large product in the dtype that the model computes in


class UpdateCost(NamedTuple):
    """The work of an update on the rank that has most of it."""

    moved: float  # bytes: masters and states are read and written, gradients read
    flops: float  # of rules that read whole matrices; those of single elements are not counted
    sent: int  # bytes to other ranks

    def bound(self, paces: Paces) -> float:
        """Seconds."""
        return self.moved / paces.bandwidth + self.flops / paces.rate


@dataclass(frozen=True)
class Updates:
    """What the ranks have measured; seconds are those of the slowest rank."""

    seconds: RoundTimes  # by optimizer
    paces: Paces
    machine: Machine
    device: str


@dataclass(frozen=True)
class OptimizerBenchResult(Result):
    jobs: dict[str, Job]  # by optimizer: the same but for it
    rounds: int
    updates: Updates

    @property
    def job(self) -> Job:
        return next(iter(self.jobs.values()))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each optimizer."""
        return [self._row(name, cost_of(job)) for name, job in self.jobs.items()]

    def _row(self, name: str, cost: UpdateCost) -> dict[str, Any]:
        times, bound = self.updates.seconds, cost.bound(self.updates.paces)
        return {
            "optimizer": name,
            "seconds": times.median(name),
            "fastest": min(times[name]),
            "slowest": max(times[name]),
            "of_first": times.ratio(name, next(iter(self.jobs))),
            "moved_bytes": cost.moved,
            "flops": cost.flops,
            "sent_bytes": cost.sent,
            "bound_seconds": bound,
            "bound_share": bound / times.median(name),
        }

    def to_dict(self) -> dict[str, Any]:
        job, machine = self.job, self.updates.machine
        return {
            "bench": "optimizer",
            "model": job.model.name,
            "layers": job.model.layers,
            "parameters": job.model.parameter_count,
            "layout": str(job.layout),
            "dtype": job.train.dtype,
            "rounds": self.rounds,
            "device": self.updates.device,
            "cores": machine.cores,
            "machine": machine.name,
            "torch": machine.torch,
            "bandwidth": self.updates.paces.bandwidth,
            "rate": self.updates.paces.rate,
            "optimizers": self.rows(),
        }

    def blocks(self) -> Iterator[Block]:
        job, paces, world = self.job, self.updates.paces, self.job.layout.world
        size = f"{job.model.name}, {job.model.layers} layers, {si(job.model.parameter_count)} parameters"
        yield Text(
            f"{size}; {job.layout}, {job.train.dtype}\n"
            f"{self.updates.device}, torch {self.updates.machine.torch}; {plural(world, 'rank')}, "
            f"{plural(self.rounds, 'round')} in turns, medians of the slowest rank\n"
            f"each rank reaches {paces.bandwidth / 1e9:.3g} GB/s and {paces.rate / 1e9:,.0f} GFLOP/s"
        )
        yield table([row | _shown(row) for row in self.rows()], COLUMNS)
        yield Text(
            "moved: bytes of masters, states and gradients; GFLOP: of whole matrices; sent: to other ranks, each of "
            "the rank that has most; bound: the time of both at these paces; of it: the share that it is "
            "of the update. Over 100%: faster than the stream that gave the pace"
        )
        yield from caveats(self.updates.seconds.values(), self.rounds, world, self.updates.machine.cores)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Columns of the table that the JSON does not have."""
    milliseconds = {"ms": "seconds", "from": "fastest", "to": "slowest", "bound": "bound_seconds"}
    return {column: 1e3 * row[key] for column, key in milliseconds.items()} | {
        "times": row["of_first"],
        "share": row["bound_share"],
        "moved": bytes_text(row["moved_bytes"]),
        "gflop": f"{row['flops'] / 1e9:,.1f}" if row["flops"] else None,
        "sent": bytes_text(row["sent_bytes"]) if row["sent_bytes"] else None,
    }


def cost_of(job: Job) -> UpdateCost:
    """The work of the rank that has most, by the planner's closed forms."""
    layout = job.layout
    cluster = Cluster((Group(1, layout.world, find_accelerator("CPU")),))  # of which nothing is asked but ranks
    workload = workload_of(job, cluster)
    zero = ZeroCost(job.model, workload.software, workload.topology)
    moved, flops, sent = 0.0, 0.0, 0
    for pp, numbers in enumerate(layout.placement.of_rank):
        count = param_share(workload, [workload.stages[number] for number in numbers])
        moved = max(moved, float(zero.updated_bytes(count, layout.zero)))
        for place in range(layout.size("stage")):
            sizes = (job.model, layout, job.data.seq, job.train.dtype, job.optimizer)
            matrices = MatrixCost.of(*sizes, RankCoords(pp=pp, stage=place))
            flops, sent = max(flops, matrices.flops), max(sent, sum(call.sent for call in matrices.calls))
    return UpdateCost(moved, flops, sent)


def jobs_of(words: list[str], names: str) -> dict[str, Job]:
    """The job with each of the optimizers, by name: with the job's settings for the one that it names, and defaults for
    the others."""
    job = read(words)
    wanted = list(dict.fromkeys(word.strip() for word in names.split(",") if word.strip()))
    if not wanted:
        raise UserError("--optimizers is empty; leave it out for the default", "option.empty")
    kinds = {name: OPTIMIZERS.named(name, trusted=True) for name in wanted}
    own = job.optimizer
    jobs = {name: structs.replace(job, optimizer=own if name == own.name else kind()) for name, kind in kinds.items()}
    refuse([f"{name}: {problem}" for name, changed in jobs.items() for problem in changed.problems()])
    if job.train.device != "cuda":
        refuse(memory_problems(job, job.layout.world, host_memory(), "this machine"))
    return jobs


def measure(words: list[str], names: str, rounds: int, on_progress: OnProgress) -> OptimizerBenchResult:
    refuse(too_small(rounds=rounds))
    jobs = jobs_of(words, names)
    world = next(iter(jobs.values())).layout.world
    on_progress(f"{', '.join(jobs)}: {plural(rounds, 'round')} in turns, {plural(world, 'rank')}")
    ranks: list[Updates] = processes.run(world, "fivefold.bench.optimizer_rank:run", jobs, rounds, timeout=_TIMEOUT_S)
    return OptimizerBenchResult(jobs, rounds, slowest(ranks))


def slowest(ranks: list[Updates]) -> Updates:
    """The seconds of each round's slowest rank, and the paces of the slowest."""
    rounds = {name: [max(each) for each in zip(*(rank.seconds[name] for rank in ranks), strict=True)]
              for name in ranks[0].seconds}  # fmt: skip
    paces = Paces(*(min(each) for each in zip(*(rank.paces for rank in ranks), strict=True)))
    return Updates(RoundTimes(rounds), paces, ranks[0].machine, ranks[0].device)
