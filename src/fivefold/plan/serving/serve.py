"""Planning for serving: how to divide a model that only generates, how fast tokens come, and for how many at once.

    plan = serve("llama3-70b", "8xH100", prompt=1024, output=256)
    plan.latency.token             # seconds for a token, at its fastest
    plan.throughput.per_gpu        # tokens per second, at its most
    plan.explanation               # why, in sentences

options.py has the ways to do it, memory.py what they hold, step.py their time (mixture.py that of experts),
sentences.py why or why not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job, job_of
from fivefold.plan.imbalance import imbalance_for
from fivefold.plan.serving.options import Service, ServingOption, frontier, options, replicas
from fivefold.plan.serving.sentences import explain, missed, no_room, problems, too_many
from fivefold.plan.serving.wording import BOUNDS, milliseconds, rate
from fivefold.report import Block, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError

MOST = 12  # rows of the frontier
CACHES = {1: "fp8", 2: "bf16"}


@dataclass(frozen=True)
class ServePlan(Result):
    """How to serve a model. `crossing` is what tp across nodes would give; the other options keep it inside."""

    service: Service
    latency: ServingOption  # the lowest per token
    throughput: ServingOption  # the most tokens per second
    meeting: tuple[ServingOption, ...]  # those that meet the targets, most tokens per second first; empty without any
    frontier: tuple[ServingOption, ...]  # from the lowest latency to the highest throughput
    crossing: ServingOption | None  # the lowest per token with tp across nodes, where the cluster is that large
    options: tuple[ServingOption, ...]
    explanation: tuple[str, ...]

    @property
    def best(self) -> ServingOption:
        """What to run: the best that meets the targets, or without targets the most tokens per second."""
        return self.meeting[0] if self.meeting else self.throughput

    def to_dict(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            return list(map(plain, value)) if isinstance(value, tuple) else getattr(value, "to_dict", lambda: value)()

        return {name: plain(value) for name, value in vars(self).items()}

    def blocks(self) -> Iterator[Block]:
        service = self.service
        yield Text(
            f"{service.spec.name} on {service.cluster}: prompts of {service.prompt:,} tokens, answers of "
            f"{service.output:,}, weights in {service.precision}, cache in {CACHES[service.cache_bytes]}",
            "bold",
        )
        yield self._choices()
        if len(self.frontier) > 1:
            last = len(self.frontier) - 1
            few = min(MOST, last + 1)  # rows, evenly spaced where the frontier is long
            rows = [_row(self.frontier[round(at * last / (few - 1))]) for at in range(few)]
            caption = "sequences: replicas x sequences of each"
            if any(one.dp > 1 for one in self.frontier):
                caption += "; dp: groups of GPUs that have sequences of their own and share the experts"
            yield Table(HEADS, rows, title="From low latency to high throughput", caption=caption)
        yield self._parts()
        for sentence in self.explanation:
            yield Text(f"\n{sentence}")

    def _choices(self) -> Table:
        """A column for each choice."""
        named = {
            "meets the targets": self.meeting[0] if self.meeting else None,
            "lowest latency": self.latency,
            "highest throughput": self.throughput,
            "tp across nodes": self.crossing,
        }
        chosen = {name: option for name, option in named.items() if option}
        rows = [[what, *(show(option) for option in chosen.values())] for what, show in FIGURES.items()]
        return Table(["", *(f">~{name}" for name in chosen)], rows, caption=_waits(self.throughput))

    def _parts(self) -> Table:
        rows = []
        for field, words in BOUNDS.items():
            low, high = getattr(self.latency.parts, field), getattr(self.throughput.parts, field)
            if low > 0 or high > 0:
                shares = f"{low / self.latency.step:.0%}", f"{high / self.throughput.step:.0%}"
                rows.append([words, milliseconds(low), shares[0], milliseconds(high), shares[1]])
        return Table(
            ["cause", ">lowest latency", ">share", ">highest throughput", ">share"],
            rows,
            title="Where a step's time goes",
            totals=[("a step", milliseconds(self.latency.step), "", milliseconds(self.throughput.step))],
        )


FIGURES: dict[str, Callable[[ServingOption], str]] = {
    "layout": lambda one: one.layout,
    "replicas": lambda one: str(one.replicas),
    "sequences each": lambda one: f"{one.batch:,}",
    "to first token": lambda one: milliseconds(one.ttft),
    "per token": lambda one: milliseconds(one.token),
    "tokens/s": lambda one: rate(one.tokens_per_second),
    "tokens/s per GPU": lambda one: rate(one.per_gpu),
    "KV cache per GPU": lambda one: f"{one.held.cache / 1e9:.1f} GB",
    "memory per GPU": lambda one: f"{one.held.total / 1e9:.1f} GB",
    "bound by": lambda one: BOUNDS[one.bound],
}
HEADS = ("~layout", ">sequences", ">first token", ">per token", ">tokens/s", ">per GPU", ">cache GB", "~bound by")


def _waits(heavy: ServingOption) -> str:
    """Why a token takes longer than a step."""
    if heavy.token <= heavy.step:
        return ""
    return (
        f"per token: a step and the prefills of other sequences that come between, {milliseconds(heavy.step)} + "
        f"{milliseconds(heavy.token - heavy.step)} at the highest throughput"
    )


def _row(one: ServingOption) -> list[str]:
    sequences = f"{one.replicas} x {one.batch:,}" if one.replicas > 1 else f"{one.batch:,}"
    times, rates = map(milliseconds, (one.ttft, one.token)), map(rate, (one.tokens_per_second, one.per_gpu))
    return [one.layout, sequences, *times, *rates, f"{one.held.cache / 1e9:.1f}", BOUNDS[one.bound]]


def serve(
    model: str | Path | ModelSpec | Job,
    cluster: str | Path | Cluster = "8xH100",
    *,
    changes: Sequence[str] = (),
    prompt: int = 2048,
    output: int = 512,
    sequences: int | None = None,
    precision: str = "bf16",
    cache_bytes: int = 2,
    ttft: float | None = None,
    tpot: float | None = None,
    graphs: bool = True,
    imbalance: float | None = None,
) -> ServePlan:
    """Plan serving. `ttft` and `tpot` are targets in seconds: to the first token, and for each one after it.

        ff.serve("llama3-70b", "8xH100", prompt=1024, output=256, ttft=0.5)

    `imbalance`: of experts, rows of the fullest group of ranks over the mean; None: as published runs have it.
    """
    job, _ = job_of(model, changes)
    if ignored := [change for change in changes if not change.startswith("model.")]:
        raise UserError(f"{' '.join(ignored)} would be ignored: serving reads settings of the model alone")
    machines = Cluster.read(cluster)
    given = (prompt, output, sequences, precision, cache_bytes, ttft, tpot, graphs, imbalance_for(job.model, imbalance))
    service = Service(job.model, machines.alike() or machines, *given)
    if found := problems(service):
        raise UserError(found)
    every = options(service)
    if not every:
        raise UserError(too_many(service) if next(replicas(service), None) else no_room(service))
    # tp stays inside the node, unless nothing fits so.
    inside = [option for option in every if not option.crosses] or every
    quick = min(inside, key=lambda one: (one.token, one.tp * one.pp))
    heavy = max(inside, key=lambda one: (one.tokens_per_second, -one.token))
    sentences, meeting = explain(service, quick, heavy), []
    if ttft is not None or tpot is not None:
        meeting = sorted((one for one in inside if one.meets(service)), key=lambda one: -one.tokens_per_second)
        if not meeting:
            sentences = (missed(service, inside), *sentences)
    across = min((one for one in every if one.crosses), key=lambda one: one.token, default=None)
    return ServePlan(service, quick, heavy, tuple(meeting), frontier(inside), across, tuple(every), sentences)
