"""Planning for serving: how to divide a model that only generates, how fast tokens come, and for how many at once.

    plan = serve("llama3-70b", "8xH100", prompt=1024, output=256)
    plan.latency.token             # seconds for a token, at its fastest
    plan.throughput.per_gpu        # tokens per second, at its most
    plan.explanation               # why, in sentences

`serve_options.py` has the ways to do it, `serve_cost.py` their time and what they hold, `serve_sentences.py` the
reasons; here is the choice among them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.cost.moe import imbalance_for
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.job.reading import job_of
from fivefold.planner.serve_options import (
    BOUND_NAMES,
    Service,
    ServingOption,
    frontier,
    milliseconds,
    options,
    rate,
    replicas,
)
from fivefold.planner.serve_sentences import explain, missed_targets, request_problems, why_nothing_fits, why_too_many
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError

MAX_FRONTIER_ROWS = 12  # rows of the frontier
CACHE_DTYPES = {1: "fp8", 2: "bf16"}


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
            f"{service.output:,}, weights in {service.precision}, cache in {CACHE_DTYPES[service.cache_bytes]}",
            "bold",
        )
        yield self._choices()
        if len(self.frontier) > 1:
            last = len(self.frontier) - 1
            few = min(MAX_FRONTIER_ROWS, last + 1)  # rows, evenly spaced where the frontier is long
            rows = [_row(self.frontier[round(at * last / (few - 1))]) for at in range(few)]
            caption = "sequences: replicas x sequences of each"
            if any(option.dp > 1 for option in self.frontier):
                caption += "; dp: groups of GPUs that have sequences of their own and share the experts"
            yield Table(FRONTIER_HEADER, rows, title="From low latency to high throughput", caption=caption)
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
        rows = [[what, *(show(option) for option in chosen.values())] for what, show in FRONTIER_CELLS.items()]
        return Table(["", *(f">~{name}" for name in chosen)], rows, caption=_waits(self.throughput))

    def _parts(self) -> Table:
        rows = []
        for field, words in BOUND_NAMES.items():
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


FRONTIER_CELLS: dict[str, Callable[[ServingOption], str]] = {
    "layout": lambda option: option.layout,
    "replicas": lambda option: str(option.replicas),
    "sequences each": lambda option: f"{option.batch:,}",
    "to first token": lambda option: milliseconds(option.ttft),
    "per token": lambda option: milliseconds(option.token),
    "tokens/s": lambda option: rate(option.tokens_per_second),
    "tokens/s per GPU": lambda option: rate(option.per_gpu),
    "KV cache per GPU": lambda option: f"{option.held.cache / 1e9:.1f} GB",
    "memory per GPU": lambda option: f"{option.held.total / 1e9:.1f} GB",
    "bound by": lambda option: BOUND_NAMES[option.bound],
}
FRONTIER_HEADER = (
    "~layout",
    ">sequences",
    ">first token",
    ">per token",
    ">tokens/s",
    ">per GPU",
    ">cache GB",
    "~bound by",
)


def _waits(heavy: ServingOption) -> str:
    """Why a token takes longer than a step."""
    if heavy.token <= heavy.step:
        return ""
    return (
        f"per token: a step and the prefills of other sequences that come between, {milliseconds(heavy.step)} + "
        f"{milliseconds(heavy.token - heavy.step)} at the highest throughput"
    )


def _row(option: ServingOption) -> list[str]:
    sequences = f"{option.replicas} x {option.batch:,}" if option.replicas > 1 else f"{option.batch:,}"
    times, rates = map(milliseconds, (option.ttft, option.token)), map(rate, (option.tokens_per_second, option.per_gpu))
    return [option.layout, sequences, *times, *rates, f"{option.held.cache / 1e9:.1f}", BOUND_NAMES[option.bound]]


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
    """Plan serving: the layouts of lowest latency and of highest throughput, and what lies between them.

        >>> ff.serve("llama3-70b", "8xH100", prompt=1024, output=256, ttft=0.5).to_dict()["latency"]["layout"]
        'tp=8'

    `model` is a name, a config.json, a job file or an object, and `changes` are KEY=VALUE. On `cluster`, requests have
    `prompt` tokens and answers `output`; `sequences` are answered at a time (None: what fits). `ttft` and `tpot` are
    targets in seconds: to the first token, and for each one after it. Matmuls are in `precision`, a number of the cache
    has `cache_bytes`, and `graphs` says whether kernels are launched as CUDA graphs.
    `imbalance`: of experts, rows of the fullest group of ranks over the mean; None: as published runs have it.
    """
    job, _ = job_of(model, changes)
    if ignored := [change for change in changes if not change.startswith("model.")]:
        raise UserError(
            f"{' '.join(ignored)} would be ignored: serving reads settings of the model alone", "change.ignored"
        )
    machines = Cluster.read(cluster)
    given = (prompt, output, sequences, precision, cache_bytes, ttft, tpot, graphs, imbalance_for(job.model, imbalance))
    service = Service(job.model, machines.alike() or machines, *given)
    if wrong := request_problems(service):
        raise UserError(wrong, "serve.service")
    fitting = options(service)
    if not fitting:
        raise UserError(
            why_too_many(service) if next(replicas(service), None) else why_nothing_fits(service), "serve.memory"
        )
    # tp stays inside the node, unless nothing fits so.
    inside = [option for option in fitting if not option.crosses] or fitting
    quick = min(inside, key=lambda option: (option.token, option.tp * option.pp))
    heavy = max(inside, key=lambda option: (option.tokens_per_second, -option.token))
    sentences, meeting = explain(service, quick, heavy), []
    if ttft is not None or tpot is not None:
        meeting = sorted(
            (option for option in inside if option.meets(service)), key=lambda option: -option.tokens_per_second
        )
        if not meeting:
            sentences = (missed_targets(service, inside), *sentences)
    across = min((option for option in fitting if option.crosses), key=lambda option: option.token, default=None)
    return ServePlan(service, quick, heavy, tuple(meeting), frontier(inside), across, tuple(fitting), sentences)
