"""`fivefold bench peers --overhead` and `peers`: the same training step by several systems, in turns, in one run.

    peers(["model.layers=4"], ranks=2, rounds=7, only="tp,pp").seconds

A step is a whole training step: forward and backward passes of every microbatch, the gradient norm, clipping, AdamW.
Every system starts from the same weights and takes the same batch, and its first losses must equal those of the others.
All ranks wait for each other between steps; a system of one process has the machine for itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msgspec import structs

from fivefold.bench.harness import (
    HUGGING_FACE,
    ONE_RANK_SENTENCE,
    OURS,
    Machine,
    OnProgress,
    RoundTimes,
    caveats,
    choices,
    refuse,
    table,
    too_small,
)
from fivefold.cost.software import ON_CPUS
from fivefold.cost.step import Workload, estimate
from fivefold.hardware.accelerators import Accelerator, Link, find_accelerator
from fivefold.hardware.cluster import Cluster, Group
from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.launch import processes
from fivefold.layout.layout import Layout
from fivefold.losses.cross_entropy import PLAIN
from fivefold.render.blocks import Block, Result, Text
from fivefold.spec.blocks import RopeScaling
from fivefold.spec.hf import to_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_RANKS, check_range, within
from fivefold.support.text import plural

# PyTorch's own implementation of each axis.
PYTORCH_PEERS = {"dp": "DDP", "zero": "FSDP2", "tp": "DTensor", "pp": "pipelining"}
BARE_LOOP = "bare loop"
# Kinds of config.json by the model of torchtitan that is the same.
TORCHTITAN_FAMILIES = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3"}
COLUMNS = {
    "~system": "system", ">s/step": "seconds:.3f", ">slowest": "slowest:.3f", ">of single": "of_its_single:.3f",
    ">limit": "limit:.3f", ">of bare": "of_bare:.3f", ">loss": "loss:.4f",
}  # fmt: skip
_STEP_TIMEOUT_S = 600.0  # seconds for a step of a system
LOSS_TOLERANCES = (
    1e-5,
    1e-3,
)  # relative tolerances: of the loss of the first step, and of the second, after one update
# The model of the comparisons on CPUs: 31.6M parameters.
MODEL_CHANGES = (
    "model=tiny", "model.hidden=512", "model.layers=8", "model.heads=8", "model.kv_heads=4", "model.head_dim=64",
    "model.ffn=1376", "model.vocab=8192", "model.context=512", "model.tied=false", "data.seq=512", "train.batch=4",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """What is compared: systems, and a job of one process, whose model, sequence, batch and microbatches they share."""

    bench: str
    job: Job
    systems: tuple[str, ...]  # "bare loop", "fivefold", "fivefold dp=2", "DTensor tp=2"
    rounds: int = 5
    threads: int = 1

    @property
    def world(self) -> int:
        return max(layout_of(self.job, system).world for system in self.systems)

    def check(self) -> None:
        problems, job = too_small(rounds=self.rounds), self.job
        if odd := [system for system in self.systems if layout_of(job, system).world not in (1, self.world)]:
            problems.append(f"{odd[0]} has neither one rank nor {self.world}, as the others; measure it by itself")
        for system in self.systems:
            layout = layout_of(job, system)
            misfits = layout.problems(job.model, seq=job.data.seq, batch=job.train.batch)
            problems += [f"{system}: {problem}" for problem in misfits]
            if system.startswith(PYTORCH_PEERS["tp"]) and job.model.kv_heads % layout.tp:  # Fivefold copies them
                problems.append(
                    f"{system}: it splits whole heads, and model.kv_heads={job.model.kv_heads} is not a multiple of "
                    f"{layout.tp}; nearest: model.kv_heads={layout.tp * (job.model.kv_heads // layout.tp + 1)}"
                )
        refuse(problems)


@dataclass(frozen=True)
class ComparisonResult(Result):
    case: Comparison
    seconds: RoundTimes
    losses: dict[str, list[float]]  # of the first two steps
    machine: Machine
    # By system whose experts are on several ranks: the fullest rank's tokens over the mean, averaged over layers.
    imbalance: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:  # type: ignore[override]
        """Whether the losses of all systems agree with those of the first."""
        expected = next(iter(self.losses.values()))
        return all(
            abs(loss - right) <= tolerance * abs(right)
            for losses in self.losses.values()
            for loss, right, tolerance in zip(losses, expected, LOSS_TOLERANCES, strict=True)
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each system: the seconds of its step, their fraction of its own step in one process and of the bare
        loop's, and the smallest fraction that several ranks could reach."""
        return [self._row(system) for system in self.seconds]

    def _row(self, system: str) -> dict[str, Any]:
        times, job = self.seconds, self.case.job
        base = system if system == HUGGING_FACE else OURS if system.startswith(OURS) else BARE_LOOP
        return {
            "system": system,
            "seconds": times.median(system),
            "fastest": min(times[system]),
            "slowest": max(times[system]),
            "of_its_single": times.ratio(system, base) if base in times else None,
            "of_bare": times.ratio(system, BARE_LOOP) if BARE_LOOP in times else None,
            "losses": self.losses[system],
            "limit": limit(job, system) if layout_of(job, system).world > 1 else None,
        }

    def to_dict(self) -> dict[str, Any]:
        return self.setup() | {"agree": self.ok, "seconds": self.seconds, "systems": self.rows}

    def setup(self) -> dict[str, Any]:
        """What was measured, and on which machine."""
        job, machine = self.case.job, self.machine
        return {
            "bench": self.case.bench,
            "parameters": job.model.parameter_count,
            "seq": job.data.seq,
            "batch": job.train.batch,
            "microbatches": job.layout.microbatches,
            "dtype": job.train.dtype,
            "rounds": self.case.rounds,
            "threads_per_rank": self.case.threads,
            "cores": machine.cores,
            "machine": machine.name,
            "torch": machine.torch,
        }

    def heading(self) -> Text:
        job, m, machine = self.case.job, self.case.job.layout.microbatches, self.machine
        size = f"{job.model.layers} layers of {job.model.hidden}, {job.model.parameter_count / 1e6:.1f}M parameters"
        batch = f"{f'{m} microbatches of ' if m > 1 else ''}{job.train.batch // m} x {job.data.seq} tokens"
        return Text(
            f"{size}; {batch}, {job.train.dtype}, AdamW\n"
            f"torch {machine.torch}, {machine.cores} cores of {machine.name}, {self.case.threads} thread a rank; "
            f"{plural(self.case.rounds, 'round')} in turns, medians"
        )

    def blocks(self) -> Iterator[Block]:
        yield self.heading()
        yield table([row | {"loss": row["losses"][0]} for row in self.rows], COLUMNS)
        limit_text = "; limit: the same if communication took no time (simulated)" if self.case.world > 1 else ""
        yield Text(
            f"of single: as a fraction of its own step in one process (PyTorch's is the bare loop){limit_text}; of "
            "bare: as a fraction of the bare loop's step; loss: of the first step"
        )
        yield from verdict(self)


def verdict(*results: ComparisonResult) -> Iterator[Block]:
    """Whether the losses agree, and how far to trust the figures."""
    agree = all(result.ok for result in results)
    yield Text(f"the losses of the first two steps {'agree' if agree else 'differ'}", "good" if agree else "bad")
    times = [seconds for result in results for seconds in result.seconds.values()]
    world = max(result.case.world for result in results)
    yield from caveats(times, results[0].case.rounds, world, results[0].machine.cores)


def overhead(changes: list[str], rounds: int, on_progress: OnProgress) -> ComparisonResult:
    case = Comparison("overhead", base_job(changes), (BARE_LOOP, OURS, HUGGING_FACE), rounds)
    return next(measure_all([case], on_progress))


def peers(changes: list[str], ranks: int, rounds: int, only: str, on_progress: OnProgress) -> ComparisonResult:
    check_range("--ranks", ranks, within(2, MAX_RANKS, ONE_RANK_SENTENCE))
    ours = {
        "dp": [f"dp={ranks}"],
        "tp": [f"tp={ranks}"],
        "pp": [f"pp={ranks}", f"pp={ranks},schedule=zb-h1"],
        "cp": [f"cp={ranks}"],
        "zero": [f"dp={ranks},zero=3"],
    }
    systems = [BARE_LOOP, OURS]
    for axis in choices(only, "--only", list(ours)):
        systems += [f"{OURS} {layout}" for layout in ours[axis]]
        if axis in PYTORCH_PEERS:
            systems.append(f"{PYTORCH_PEERS[axis]} {ours[axis][0]}")
    return next(measure_all([Comparison("peers", base_job(changes), tuple(systems), rounds)], on_progress))


def measure_all(cases: Sequence[Comparison], on_progress: OnProgress) -> Iterator[ComparisonResult]:
    """Check all cases before the first process starts; then yield the result of each."""
    for case in cases:
        case.check()
    for case in cases:
        rounds = plural(case.rounds, "round")
        on_progress(f"{len(case.systems)} systems, {rounds} in turns, up to {plural(case.world, 'rank')}")
        yield measure(case)


def measure(case: Comparison) -> ComparisonResult:
    timeout = _STEP_TIMEOUT_S * (case.rounds + 2) * len(case.systems)
    result: ComparisonResult = processes.run(case.world, "fivefold.bench.baselines:run", case, timeout=timeout)[0]
    return result


def layout_of(job: Job, system: str) -> Layout:
    """The layout of a system's ranks; the global batch is cut into the same microbatches."""
    text = system.rpartition(" ")[2] if "=" in system else ""
    layout = Layout.parse(text) if text else Layout()
    if "microbatches" in text:
        return layout
    return structs.replace(layout, microbatches=max(1, job.layout.microbatches // layout.dp))


def predict(job: Job, text: str, core: Accelerator, imbalance: float = 1.0) -> float:
    """The planner's seconds of a step; `text` is a layout, or `OURS` for one process."""
    layout = layout_of(job, text)
    cluster, software = Cluster((Group(1, layout.world, core),)), ON_CPUS.computing_in("fp32")
    workload = Workload(
        job.model, layout, cluster, job.data.seq, job.train.batch, "fp32", software, imbalance=imbalance
    )
    return estimate(workload).seconds


def limit(job: Job, system: str, cores: tuple[Accelerator, Accelerator] | None = None, imbalance: float = 1.0) -> float:
    """A system's step as a fraction of one process's, if communication took no time: what is left is work that ranks
    repeat, bubbles, and the wait for the rank with the most tokens. `cores`, if they are known: a core that works by
    itself, and one while the others work."""
    alone, busy = cores or (find_accelerator("CPU"),) * 2
    no_time = Link(1e30, 0.0, "takes no time")
    busy = structs.replace(busy, inside=no_time, across=no_time)
    return predict(job, system, busy, imbalance) / predict(job, OURS, alone)


def base_job(changes: list[str], microbatches: int = 4) -> Job:
    """The job of a comparison: a small model on CPUs, with changes that all systems support."""
    # Without weight decay: systems differ in which parameters they exempt, and the speed does not depend on it.
    settings = [f"layout=microbatches={microbatches}", "train.compile=off", "optimizer.weight_decay=0"]
    job = read_job(None, [*MODEL_CHANGES, *settings, *changes])
    train = job.train
    rules = [
        (train.dtype == "float32", f"train.dtype={train.dtype}: comparisons are in float32"),
        (train.compile == "off" and not train.fp8, "train.compile and train.fp8 are Fivefold's alone here"),
        (not job.model.tied, "the model must not be tied: model.tied=false"),
    ]
    refuse([*of_one_process(job), *(sentence for fair, sentence in rules if not fair), *only_ours(job)])
    return job


def of_one_process(job: Job) -> list[str]:
    """Problems of a job that is measured in one process."""
    if job.layout.world > 1:
        ranks_asked = f"layout={job.layout} has {job.layout.world} ranks, and the job is to be one process's"
        return [f"{ranks_asked}; `fivefold bench peers --ranks {job.layout.world}` measures several"]
    return job.problems(world=1)


def _hf_problems(model: ModelSpec) -> list[str]:
    """Why Hugging Face's transformers has no such model."""
    try:
        to_hf_config(model, "float32")
    except UserError as error:
        return list(error.problems)
    return []


def torchtitan_problems(model: ModelSpec) -> list[str]:
    """Why torchtitan's Llama 3 and Qwen3 are not this model."""
    try:
        kind = to_hf_config(model, "float32")["model_type"]
    except UserError as error:
        return list(error.problems)
    if kind not in TORCHTITAN_FAMILIES:
        return [f"torchtitan is measured with {', '.join(TORCHTITAN_FAMILIES)}, and {model.name} is {kind}"]
    if kind == "llama" and (model.tied or (model.rope_scaling and not isinstance(model.rope_scaling, RopeScaling))):
        return [f"torchtitan's Llama 3 is untied with Llama 3's rotation, and {model.name} is not; nearest: llama3-8b"]
    with suppress(PackageNotFoundError):
        if (installed := version("torchtitan")).startswith("0.2."):
            return []
        return [f"torchtitan {installed} is installed, and 0.2 is measured; nearest: pip install torchtitan==0.2.2"]
    return ["it is not installed; nearest: pip install --no-deps torchtitan==0.2.2 tyro typeguard docstring_parser"]


def only_ours(job: Job) -> list[str]:
    """Settings that Hugging Face's model in a plain loop ignores."""
    train, model = job.train, job.model
    losses = train.balance_loss == train.router_z_loss == 0
    balances = model.experts is not None and model.experts.balance_bias and train.balance_rate
    rules = [
        *((False, f"Hugging Face has no such model: {problem}") for problem in _hf_problems(model)),
        (losses and not balances, "what keeps the load of experts even is Fivefold's alone here; leave it out"),
        (not model.dropout, f"model.dropout={model.dropout} is Fivefold's alone here"),
        (job.loss == PLAIN, "losses but plain cross-entropy are Fivefold's alone here"),
        (job.optimizer.clip > 0, "optimizer.clip=0: all systems clip"),
        (
            job.optimizer.unit == "element",
            f"optimizer.name={job.optimizer.name}: only Fivefold brings matrices together",
        ),
        (job.layout.recompute == "none", "recompute is Fivefold's alone here"),
    ]
    return [sentence for fair, sentence in rules if not fair]
