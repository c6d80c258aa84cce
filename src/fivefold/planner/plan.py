"""Planning as two functions: which layout to take, and how long a step of a given layout takes.

plan("llama3-70b", "8x8xH100").chosen.layout
simulate("llama3-8b", "pp=8,schedule=zb-v,microbatches=16,recompute=selective", batch=16).option.seconds

They take names or objects, raise UserError for input that cannot be planned, and print nothing.
"""

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from fivefold.cost.moe import imbalance_for
from fivefold.cost.step import Workload
from fivefold.cost.systems import software_of
from fivefold.hardware.cluster import Cluster
from fivefold.job.aliases import layout_changes
from fivefold.job.config import Job
from fivefold.job.reading import job_of
from fivefold.job.recipes import usual_batch
from fivefold.layout.layout import Layout
from fivefold.planner.explain import RANKS_BY, better_batch, nearest_fit, neighbours, simplest
from fivefold.planner.mixed import groups_of, merge_groups
from fivefold.planner.option import Option, evaluate
from fivefold.planner.result import PlanResult, SimulateResult
from fivefold.planner.search import SURVIVORS, By, Ranking, search
from fivefold.planner.training import batch_of, budget_of, training_of
from fivefold.spec.model import ModelSpec
from fivefold.support.dtypes import precision_of
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_TOKENS, SEQUENCES, check_range, misfit, within
from fivefold.support.text import did_you_mean

USUAL_CLUSTER = "8xH100"  # where neither the question nor the job names one
DEFAULT_SEQ = 8192  # tokens of a sequence, where none is given and the model's context is longer


@contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """A plan makes a million tuples and hardly a cycle: the collector would go over all of them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_cycle_collection()
def plan(
    model: str | Path | ModelSpec | Job,
    cluster: str | Path | Cluster | None = None,
    *,
    changes: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    tokens: str | float | None = None,
    layout: str | Layout | None = None,
    fix: str | Mapping[str, Any] = "",
    by: By = "throughput",
    top: int = 5,
    precision: str = "",
    software: str = "fivefold",
    price: float | None = None,
    imbalance: float | None = None,
) -> PlanResult:
    """Search all layouts of a model on a cluster, choose one, and say why.

        >>> print(ff.plan("llama3-8b", "8xH100").chosen.layout)
        dp=8,zero=2,microbatches=64,recompute=selective
        >>> print(ff.plan("tiny", "2xCPU", batch=16, seq=128, fix="tp=2").chosen.layout)
        tp=2,sp

    `model` is a name, a config.json, a job file or an object, and `cluster` by default the job's, or 8xH100. `changes`
    are KEY=VALUE settings of the model or job, `batch` counts sequences of a step, `seq` the tokens of one; `fix` holds
    choices that are not free ("tp=8,zero=1"), `layout` is explained beside the choice. The `top` layouts are listed
    `by` throughput, memory or pareto. Matmuls are in `precision` (bf16, on CPUs fp32), kernels and overlap those of a
    `software` (fivefold, nemo, torchtitan, megatron). `price` is dollars per device and hour. `tokens` is the length of
    the run ("1.4T", 300e9, or "chinchilla": 20 per parameter). The settings of `.job` are those of published recipes,
    and so is the batch, where it is not given. `imbalance` is what the fullest rank gets of the tokens that visit
    experts, over the mean; by default as in published pairs.
    """
    _check_options(by, top, price)
    if layout is not None and fix:
        raise UserError(
            "a layout leaves nothing to search, and fix holds choices of a search; give one of them", "option.conflict"
        )
    if wrong := layout_changes(changes, "--fix " if layout is None else f"--layout {layout},"):
        raise UserError(wrong)
    job, kept, workload = _question(model, cluster, changes, batch, seq, precision, software, tokens)
    workload = replace(workload, imbalance=imbalance_for(workload.spec, imbalance))
    training = training_of(
        job, kept, workload, tokens, _cluster_text(workload.cluster, cluster or job.run.cluster or USUAL_CLUSTER), batch
    )
    free = batch is None and tokens is None and kept is not None and "train.batch" not in kept
    given = _evaluate_layout(workload, layout) if layout is not None else None
    fixed = fixed_choices(fix)
    ranking, unsearched = _rank_layouts(workload, by, top, fixed, given)
    chosen = simplest(ranking.options) if by == "throughput" and not unsearched else ranking.best
    explained = given or chosen
    fastest = ([] if unsearched else ranking.options) if by == "throughput" else None
    return PlanResult(
        workload=workload,
        options=ranking.options[:top],
        chosen=chosen,
        given=given,
        evaluated=ranking.evaluated,
        fitting=ranking.fitting,
        neighbours=tuple(neighbours(explained)),
        hint=better_batch(explained),
        price=price,
        training=training,
        by=by,
        fixed=fixed,
        batch_from=usual_batch(workload.spec, workload.seq, workload.cluster.world).why if free else "",
        unsearched=unsearched,
        nearest=nearest_fit(given, fastest) if given and not given.fits else None,
    )


def _check_options(by: str, top: int, price: float | None) -> None:
    if wrong := misfit("price", price, within(0, 1e6, "it is in dollars per GPU and hour")):
        raise UserError(wrong, "option.range")
    if by not in get_args(By):
        raise UserError(f"by={by!r} is not a ranking; {did_you_mean(str(by), get_args(By))}", "option.choice")
    check_range("top", top, within(1, SEQUENCES))


def _rank_layouts(
    workload: Workload, by: By, top: int, fixed: dict[str, Any], given: Option | None
) -> tuple[Ranking, str]:
    """The best layouts; if there is none but the `given` one, which can still be timed, also why."""
    try:
        return search(workload, by, max(top, SURVIVORS) if by == "throughput" else top, **fixed), ""
    except UserError as error:
        if given is None:
            raise
        return Ranking((given,), 0, 0), "; ".join(error.problems)


def simulate(
    model: str | Path | ModelSpec | Job,
    layout: str | Layout,
    cluster: str | Path | Cluster | None = None,
    *,
    changes: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    precision: str = "",
    software: str = "fivefold",
    imbalance: float | None = None,
) -> SimulateResult:
    """Time one step of a layout: its schedule runs on a clock. No GPU and no weights are needed.

        >>> ff.simulate("llama3-8b", "dp=2,pp=4,microbatches=8,schedule=zb-h1", batch=16, seq=4096).ok
        True
        >>> ff.simulate("llama3-70b", "dp=8,tp=8,zero=1", "8x8xH100").ok  # it does not fit into the devices
        False

    `model`, `cluster`, `changes`, `batch`, `seq`, `precision`, `software` and `imbalance` are those of `plan`, and
    `layout` is the one to time.
    """
    if wrong := layout_changes(changes, f"--layout {layout},"):
        raise UserError(wrong)
    option = option_of(question(model, cluster, changes, batch, seq, precision, software), layout, imbalance)
    return SimulateResult(option, None if option.fits else nearest_fit(option))


def option_of(workload: Workload, layout: str | Layout, imbalance: float | None = None) -> Option:
    """A layout of a question's workload, timed; whether it fits or not."""
    return _evaluate_layout(replace(workload, imbalance=imbalance_for(workload.spec, imbalance)), layout)


def workload_of(job: Job, cluster: Cluster, precision: str = "", software: str = "fivefold") -> Workload:
    """A job as the planner asks: its model, layout, sizes and optimizer, in its precision or another, as a software
    runs it on these devices."""
    precision = precision or ("fp8" if job.train.fp8 else precision_of(job.train.dtype))
    profile = software_of(software, cluster.groups[0].accelerator)
    profile = profile.optimizing_with(job.optimizer, job.model.parameters()).computing_in(precision)
    return Workload(job.model, job.layout, cluster, job.data.seq, job.train.batch, precision, profile)


def plan_given_layout(job: Job, cluster: Cluster) -> Option:
    """A job's own layout on a cluster."""
    return option_of(_check_rate(workload_of(job, cluster)), job.layout)


def _check_rate(workload: Workload) -> Workload:
    """Raises UserError if a device has no rate for the precision; names the ones it has."""
    for group in workload.cluster.groups:
        group.accelerator.rate(workload.precision)
    return workload


def fixed_choices(fix: str | Mapping[str, Any]) -> dict[str, Any]:
    """Choices of a layout that are not free, and `microbatch`, the sequences of one."""
    if not isinstance(fix, str):
        return {"samples" if key == "microbatch" else key: value for key, value in fix.items()}
    parts = [part for piece in fix.split(",") if (part := piece.strip())]
    size = [part.removeprefix("microbatch=") for part in parts if re.fullmatch(r"microbatch=\d+", part)]
    rest = [part for part in parts if not re.fullmatch(r"microbatch=\d+", part)]
    layout = Layout.parse(",".join(rest))
    fixed = {key: getattr(layout, key) for part in rest if not (key := part.partition("=")[0].strip()).isdigit()}
    return fixed | ({"samples": int(size[-1])} if size else {})


def question(
    model: str | Path | ModelSpec | Job,
    cluster: str | Path | Cluster | None = None,
    changes: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    precision: str = "",
    software: str = "fivefold",
) -> Workload:
    """A checked workload, whose layout is open."""
    return _question(model, cluster, changes, batch, seq, precision, software)[-1]


def _question(
    model: str | Path | ModelSpec | Job,
    cluster: str | Path | Cluster | None,
    changes: Sequence[str],
    batch: int | None,
    seq: int | None,
    precision: str,
    software: str,
    tokens: str | float | None = None,
) -> tuple[Job, set[str] | None, Workload]:
    """The job behind the question; its settings that stay, None if all do; a checked workload, whose layout is open."""
    options = {"data.seq": ("seq", seq), "train.batch": ("batch", batch), "run.cluster": ("cluster", cluster)}
    options |= dict.fromkeys(("train.dtype", "train.fp8"), ("precision", precision or None))
    for change in changes:
        option, value = options.get(change.partition("=")[0], ("", None))
        if value is not None:
            raise UserError(f"{change} and {option}={value} say the same thing; give one of them", "option.conflict")
    job, named = job_of(model, changes)
    kept = None if isinstance(model, Job) or str(model).endswith(".toml") else named
    if not precision and (job.train.fp8 or "train.dtype" in named):
        precision = "fp8" if job.train.fp8 else precision_of(job.train.dtype)
    machines, spec = Cluster.read(cluster or job.run.cluster or USUAL_CLUSTER), job.model
    if wrong := spec.problems():
        raise UserError(wrong)
    if seq is None:
        seq = job.data.seq if "data.seq" in named else min(spec.context, DEFAULT_SEQ)
    check_range("seq", seq, within(1, MAX_TOKENS))
    if spec.positions == "learned" and seq > spec.context:
        longer = f"seq={seq} is longer than the {spec.context} learned positions of {spec.name}"
        raise UserError(f"{longer}; nearest: seq={spec.context}", "data.seq.positions")
    if batch is None:
        if "train.batch" in named:
            batch = job.train.batch
        elif total := budget_of(tokens, job):
            batch = batch_of(job, total, seq, machines.world)
        else:
            batch = usual_batch(spec, seq, machines.world).value
    check_range("batch", batch, within(1, SEQUENCES))
    precision = precision_of(precision) or ("fp32" if machines.groups[0].accelerator.is_cpu else "bf16")
    workload = _check_rate(workload_of(job, machines, precision, software))
    return job, kept, replace(workload, layout=Layout(), seq=seq, batch=batch)


def _cluster_text(cluster: Cluster, given: str | Path | Cluster) -> str:
    """How a job names its cluster: as the user did, since a file may have replaced figures of the catalogue."""
    return str(given).strip() if isinstance(given, str | Path) else str(cluster)


def _evaluate_layout(workload: Workload, layout: str | Layout) -> Option:
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    problems = layout.problems(
        workload.spec, world=workload.cluster.world, seq=workload.seq, batch=workload.batch, ranks_by=RANKS_BY
    )
    if problems:
        raise UserError(problems)
    workload = replace(workload, cluster=merge_groups(workload.cluster))
    return evaluate(replace(workload, layout=layout, groups=groups_of(workload.cluster, layout)))
