"""Dry-run any rank of any world: the code that would train, without data and without GPUs.

dryrun("llama3-70b", "dp=8,tp=8,zero=3,sp", batch=8, rank=9)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import structs

from fivefold.dry.result import DryRunResult, RankVsPlan, vs_plan
from fivefold.hardware.cluster import Cluster
from fivefold.job.aliases import layout_changes
from fivefold.job.config import Job
from fivefold.job.reading import job_of
from fivefold.layout.layout import Layout
from fivefold.planner.plan import workload_of
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.parsing import path_of
from fivefold.support.ranges import MAX_TOKENS, SEQUENCES, check_range, within

_MAX_TRIALS = 3  # changes that are dry-run before the advice says that none fits


def dryrun(
    model: str | Path | ModelSpec | Job,
    layout: str | Layout | None = None,
    *,
    changes: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    rank: int | Sequence[int] | None = None,
    stages: Literal["all"] | Sequence[int] | None = None,
    cluster: str | Cluster = "",
    kernels: Literal["cuda", "cpu"] = "cuda",
    weights: str | Path | None = None,
    imbalance: float | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> DryRunResult:
    """Runs one step of some ranks, and compares the counts with the planner's figures.

        >>> ff.dryrun("tiny", "dp=8,tp=2,zero=3", batch=8, seq=64, rank=15).ok
        True
        >>> len(ff.dryrun("tiny", "dp=8,pp=2,microbatches=2", batch=16, seq=64, stages="all").ranks)
        2

    `model` is a name, a config.json, a job file or an object; `changes` are KEY=VALUE. The step has `batch` sequences
    of `seq` tokens in `layout`, by default the job's. `rank` names ranks; `stages` names pipeline ranks, of each of
    which the first rank runs; default: rank 0. `cluster` has the memory that the step must fit (default: the job's, or
    H100s). `kernels`: those whose saved activations are counted. `weights` is a Hugging Face directory that must have
    every parameter. `imbalance`, for experts: tokens are not routed, and each rank that runs gets this many times the
    mean of its ep group, by default 1. `progress` is called with how many ranks are done, of how many, and the next.
    """
    check_range("batch", batch, within(1, SEQUENCES))
    check_range("seq", seq, within(1, MAX_TOKENS))
    job = _job(model, layout, changes, batch, seq)
    peak_load = _imbalance(job, imbalance)
    machines = _machines(cluster, job)
    ranks = _ranks(job.layout, rank, stages)
    if weights is not None:
        _check_weights(job, path_of(weights))
    from fivefold.dry.rank import dry_run_rank

    compared = []
    for number, rank_number in enumerate(ranks):
        progress(number, len(ranks), f"rank {rank_number} of {job.layout.world}")
        compared.append(vs_plan(job, dry_run_rank(job, rank_number, kernels, peak_load), machines, peak_load))
    return DryRunResult(job, machines, compared, _advice(job, compared, machines, peak_load), peak_load)


# ---- reading -----------------------------------------------------------------------------------------------------


def _job(
    model: str | Path | ModelSpec | Job,
    layout: str | Layout | None,
    changes: Sequence[str],
    batch: int | None,
    seq: int | None,
) -> Job:
    if layout is not None and (conflicts := layout_changes(changes, f"--layout {layout},")):
        raise UserError(conflicts)
    job, named = job_of(model, changes)  # named: the keys that the job file or `changes` set
    if layout is None:
        layout = job.layout
    elif not isinstance(layout, Layout):
        layout = Layout.parse(layout)
    if seq is None:
        seq = job.data.seq if "data.seq" in named else min(job.model.context, 8192)
    if batch is None:
        batch = job.train.batch if "train.batch" in named else max(1, layout.size("batch") * layout.microbatches)
    is_job = isinstance(model, Job) or str(model).endswith(".toml")
    dtype = job.train.dtype if is_job or "train.dtype" in named else "bfloat16"
    job = structs.replace(
        job,
        layout=layout,
        data=structs.replace(job.data, seq=seq),
        train=structs.replace(job.train, batch=batch, dtype=dtype),
    )
    if problems := job.problems(world=layout.world):
        raise UserError(problems)
    return job


def _imbalance(job: Job, given: float | None) -> float:
    """The tokens that the rank that runs gets, over the mean of its ep group; 1 by default."""
    if given is None:
        return 1.0
    experts, ep = job.model.experts, job.layout.ep
    if experts is None:
        raise UserError(f"imbalance={given:g} is for experts, and {job.model.name} has none", "imbalance.dense")
    if ep == 1:
        raise UserError(
            f"imbalance={given:g} is of the ranks of ep, and {job.layout} has every expert on every rank",
            "imbalance.ep",
        )
    if not 1 <= given <= ep:
        nearest = min(given, ep) if given > 1 else 1.0  # also of nan, which compares with nothing
        raise UserError(
            f"imbalance={given:g} is the largest load of the {ep} ep ranks over the mean: 1 to {ep}; nearest: "
            f"imbalance={nearest:g}",
            "imbalance.range",
        )
    return given


def _machines(cluster: str | Cluster, job: Job) -> Cluster:
    """The cluster that is named, or the job's, or H100s: of as many devices as the layout has ranks."""
    world = job.layout.world
    if not cluster:
        if job.run.cluster and (planned := Cluster.read(job.run.cluster)).world == world:
            return planned
        return Cluster.parse(f"{world}xH100" if world <= 8 else f"{-(-world // 8)}x8xH100")
    machines = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    if machines.world != world:
        raise UserError(f"the layout has {world} ranks, and {machines} has {machines.world} GPUs", "layout.ranks.given")
    return machines


def _ranks(
    layout: Layout, rank: int | Sequence[int] | None, stages: Literal["all"] | Sequence[int] | None
) -> list[int]:
    """The ranks to run; for pipeline ranks, the first of each."""
    if rank is not None and stages is not None:
        raise UserError("--rank and --stages choose ranks in different ways; give one of them", "option.conflict")
    if stages is not None:
        pp_ranks = list(range(layout.pp)) if stages == "all" else [int(stage) for stage in stages]
        if outside := [stage for stage in pp_ranks if not 0 <= stage < layout.pp]:
            raise UserError(
                f"--stages {outside[0]}: the pipeline ranks of {layout} are 0 to {layout.pp - 1}", "option.range"
            )
        return [layout.rank(pp=stage) for stage in pp_ranks]
    ranks = [rank or 0] if rank is None or isinstance(rank, int) else list(dict.fromkeys(rank))
    if outside := [number for number in ranks if not 0 <= number < layout.world]:
        raise UserError(
            f"rank {outside[0]} is outside of {layout}; its ranks are 0 to {layout.world - 1}", "option.range"
        )
    return ranks


def _check_weights(job: Job, directory: Path) -> None:
    """Raises UserError unless every parameter of the model is in the directory, in its shape."""
    from fivefold.checkpoint.hf_files import HuggingFace

    files = HuggingFace(directory)  # raises UserError for missing tensors and wrong shapes
    theirs, ours = (msgspec.to_builtins(spec) for spec in (files.spec, job.model))
    shape = [key for key in ours if key not in ("name", "context", "init_std", "dropout")]
    others = [f"{key} {theirs[key]} instead of {ours[key]}" for key in shape if theirs[key] != ours[key]]
    if others:
        raise UserError(
            f"{directory} holds another model than {job.model.name}: {', '.join(others)}", "checkpoint.model"
        )


# ---- advice ------------------------------------------------------------------------------------------------------


def _advice(job: Job, compared: list[RankVsPlan], machines: Cluster, imbalance: float) -> str:
    """A sentence if a rank does not fit: its largest component, by how much, and the cheapest change that fits."""
    memory = min(group.accelerator.memory for group in machines.groups)
    worst = max(compared, key=lambda rank: rank.device_bytes)
    if worst.device_bytes <= memory:
        return ""
    from fivefold.dry.rank import dry_run_rank
    from fivefold.planner.explain import neighbours
    from fivefold.planner.option import evaluate

    largest = max(worst.predicted.parts.items(), key=lambda part: part[1])
    stage = worst.dry.place["pp"]
    sentence = (
        f"it does not fit: rank {worst.dry.rank} (pipeline rank {stage}) needs {worst.device_bytes / 1e9:.1f} GB at "
        f"{worst.dry.peak_moment}, {(worst.device_bytes - memory) / 1e9:.1f} GB more than a device has; most of it, "
        f"{largest[1] / 1e9:.1f} GB, is {largest[0]}"
    )
    fitting = [
        neighbour
        for neighbour in neighbours(evaluate(replace(workload_of(job, machines), imbalance=imbalance)))
        if neighbour.slower is not None
    ]
    # By the plan these fit; a dry run confirms it before one is advised.
    for neighbour in sorted(fitting, key=lambda neighbour: neighbour.slower or 0.0)[:_MAX_TRIALS]:
        other = structs.replace(job, layout=neighbour.layout)
        if other.problems(world=other.layout.world):
            continue
        rank = other.layout.rank(pp=min(stage, other.layout.pp - 1))
        peak_load = min(imbalance, other.layout.ep)
        if vs_plan(other, dry_run_rank(other, rank, imbalance=peak_load), machines, peak_load).device_bytes <= memory:
            cheapest = f"{neighbour.change} ({neighbour.slower:+.1%} time)"
            return f"{sentence}; the cheapest single change that fits: {cheapest}"
    return f"{sentence}; no single change makes it fit: try `fivefold plan`"
