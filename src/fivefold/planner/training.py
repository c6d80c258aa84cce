"""From a plan to a training run: its token budget, its settings with their reasons, and its job file.

training = training_of(job, {"optimizer.lr"}, workload, tokens=None, cluster="8x8xH100")
training.job(option)          # what `fivefold train` runs
training.file(option)         # the same, as a file for people
"""

import shlex
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from fivefold.cost.step import Workload
from fivefold.job.aliases import NO_FP16
from fivefold.job.config import Job
from fivefold.job.preflight import needs_data
from fivefold.job.recipes import CHINCHILLA, RECIPE_SOURCES, Choice, fit, recipe, tokens_of, usable_batch
from fivefold.job.toml_writer import commented_toml
from fivefold.planner.error_range import IN_WORDS, step_range
from fivefold.planner.failure_costs import DEFAULT_FLEET, PUBLISHED, FailureCosts, failures_of, saved_bytes
from fivefold.planner.failure_simulation import SIMULATED_RUNS
from fivefold.planner.goodput import GoodputRun, days_text
from fivefold.planner.mixed import hosts_in_rank_order
from fivefold.planner.option import Option
from fivefold.render.blocks import Table
from fivefold.support.dtypes import DTYPES, precision_of
from fivefold.support.errors import UserError
from fivefold.support.text import bytes_text, si

HOUR, DAY = 3600, 86_400
GB = 1e9
EVALUATED = HOUR / 2  # between two looks at the held-out loss
# Of compute, by what was planned. fp16 would need a loss scale, and a job has no switch for tf32.
_TRAIN_DTYPE = {precision_of(dtype): dtype for dtype in DTYPES} | {"fp8": "bfloat16"}
CHINCHILLA_BUDGET = "chinchilla"  # as a token budget: 20 per parameter, and the batch of the recipe


def budget_of(tokens: str | float | None, job: Job) -> int | None:
    """The tokens of a run; None, where nobody has said."""
    if tokens is None or tokens == CHINCHILLA_BUDGET:
        return None if tokens is None else CHINCHILLA * job.model.parameter_count
    return tokens_of(tokens)


def batch_of(job: Job, tokens: int, seq: int, world: int) -> int:
    """Sequences of a step, as the recipe has them and the ranks can divide them."""
    return usable_batch(recipe(job.model, seq, tokens)["train.tokens"].value, seq, world)


@dataclass(frozen=True)
class Training:
    """A run of `tokens` tokens. `choices` are settings of the recipe that the user did not make."""

    asked: Job
    tokens: int
    steps: int
    choices: dict[str, Choice]
    kept: Set[str] | None  # settings that the user made; None: all, in a job of their own
    cluster: str  # as the user wrote it
    said: bool  # whether the user asked for a budget, or for a job

    def settings(self, option: Option) -> dict[str, Choice]:
        """All that the plan decides beside the layout."""
        workload, chosen = option.workload, dict(self.choices)
        chosen["data.seq"] = Choice(workload.seq, "tokens of a sample, as planned")
        chosen["train.batch"] = chosen.get("train.batch", Choice(workload.batch, f"sequences of {workload.seq:,}"))
        if workload.precision in _TRAIN_DTYPE:
            chosen["train.dtype"] = Choice(_TRAIN_DTYPE[workload.precision], f"planned in {workload.precision}")
        if workload.precision == "fp8" or self.asked.train.fp8:
            chosen["train.fp8"] = Choice(workload.precision == "fp8", "matmuls of blocks, as planned")
        chosen["run.cluster"] = Choice(self.cluster, "what this file was planned for")
        if workload.groups:
            chosen["run.cluster"] = Choice(self.hosts(option), "nodes in the order of their hosts' numbers, as planned")
        if self.kept is None:
            return chosen
        if workload.first_device.accelerator.is_cpu:
            chosen["train.device"] = Choice("cpu", "as planned")
        run = self.run(option)
        chosen["checkpoint.every"] = Choice(run.best, interval_reason(option, run))
        half = min(int(float(f"{max(1, EVALUATED / option.seconds):.0e}")), run.most)
        chosen["train.eval_every"] = Choice(half, "steps: about half an hour, at most a tenth of the run")
        chosen["run.name"] = Choice(workload.spec.name, "the directory below runs/")
        decided = ("data.seq", "train.batch", "train.dtype", "run.cluster")
        return {key: choice for key, choice in chosen.items() if key in decided or key not in self.kept}

    def run(self, option: Option, costs: FailureCosts = PUBLISHED, every: int | None = None) -> GoodputRun:
        """The run under failures, saved as the job is, or else as is best."""
        run = GoodputRun(self.steps, option.seconds, 0, failures_of(option, costs, self.asked.train.timeout))
        if every is None and (self.kept is None or "checkpoint.every" in self.kept):
            every = self.asked.checkpoint.every
        if not self.asked.checkpoint.save:
            every = 0
        return replace(run, every=run.best if every is None else every)

    def hosts(self, option: Option) -> str:
        """The cluster as its hosts are to be numbered."""
        return (
            hosts_in_rank_order(option.workload.cluster, option.layout.dp, self.cluster)
            if option.workload.groups
            else self.cluster
        )

    def job(self, option: Option, schedule: str = "") -> Job:
        """`schedule`: the file with the option's own, where it has one (`search.py` writes it)."""
        if option.workload.precision not in _TRAIN_DTYPE:
            raise UserError(_no_job(option.workload), "precision.training")
        layout = structs.replace(option.layout, schedule=schedule) if schedule else option.layout
        changed: dict[str, Any] = {"layout": layout}
        for key, choice in self.settings(option).items():
            section, _, field = key.partition(".")
            changed[section] = structs.replace(
                changed.get(section, getattr(self.asked, section)), **{field: choice.value}
            )
        return structs.replace(self.asked, **changed)

    def file(self, option: Option, path: str = "job.toml", command: str = "", schedule: str = "") -> str:
        """A job file; a job that could not be trained is refused. `command` is what made it."""
        job, spec = self.job(option, schedule), option.workload.spec
        if problems := job.problems(world=option.layout.world):
            raise UserError(problems)
        head = [
            f"{spec.name} on {self.cluster}: {expected_text(option)}",
            f"{self.sentence(option)}. Start it with {start(option, path)}.",
            *([f"Made by: {command}"] if command else []),
            *([f"Sources: {RECIPE_SOURCES}."] if any(key.startswith("optimizer.") for key in self.choices) else []),
        ]
        fill = "a directory made by fivefold data prepare"
        fill = f"fill in: {fill}" if needs_data(job) else f"{fill}; without it, Python's own source"
        hints = {} if not job.data.usual else {"data": f'path = "..."  {fill}'}
        why = {key: choice.why for key, choice in self.settings(option).items()}
        return commented_toml(job, why, head, hints)

    def figures(self, option: Option, price: float | None) -> dict[str, Any]:
        seconds, interval = self.steps * option.seconds, step_range(option.workload)
        hours = seconds * option.layout.world / HOUR
        made = self.settings(option)
        row: dict[str, Any] = {
            "tokens": self.tokens,
            "steps": self.steps,
            "days": seconds / DAY,
            "days_range": interval and interval.around(seconds / DAY),
            "gpu_hours": hours,
            "with_failures": self.run(option).figures(),
            "settings": {key: {"value": choice.value, "why": choice.why} for key, choice in made.items()},
        }
        return row if price is None else row | {"cost": price * hours}

    def sentence(self, option: Option, price: float | None = None) -> str:
        figures, count = self.figures(option, price), self.asked.model.parameter_count
        ratio = self.tokens / count
        many = f"{ratio:.3g}" if ratio < 1e4 else si(ratio)
        device = "rank-hours" if option.workload.first_device.accelerator.is_cpu else "GPU-hours"
        cost = f", ${figures['cost']:,.0f}" if price is not None else ""
        return (
            f"{si(self.tokens, 4)} tokens, {many} per parameter: {self.steps:,} steps, {days_text(figures['days'])}, "
            f"{_count(figures['gpu_hours'])} {device}{cost}"
        )

    def failing(self, option: Option) -> str:
        """How long it takes with failures."""
        run = self.run(option)
        outcome, rate = run.simulated(), f"one in {days_text(run.failures.between / DAY)}"
        often = f"a checkpoint every {run.every:,} steps" if run.every else "a checkpoint at the end"
        if outcome is None:
            return f"with failures, {rate}, and {often}, it comes to no end"
        low, _, high = (days_text(days) for days in run.days(outcome))
        span = low if low == high else f"{low} to {high}"
        return (
            f"with failures, {rate}, and {often}: {span} (p10 to p90 of {SIMULATED_RUNS:,} simulated runs), "
            f"{run.work / run.expected:.1%} of it training; fivefold goodput has the parts"
        )

    def table(self, option: Option) -> Table:
        rows = [(key, str(choice.value), choice.why) for key, choice in self.settings(option).items()]
        caption = RECIPE_SOURCES if any(key.startswith("optimizer.") for key in self.choices) else ""
        return Table(["setting", "value", "~where it comes from"], rows, title="Training", caption=caption)


def training_of(
    job: Job, kept: Set[str] | None, workload: Workload, tokens: str | float | None, cluster: str, batch: int | None
) -> Training:
    """A job of one's own keeps its settings, and a budget changes its steps; a model gets a recipe."""
    step, total = workload.batch * workload.seq, budget_of(tokens, job)
    own = kept is None or "train.steps" in kept
    if total is not None and kept is not None and own:
        raise UserError(
            f"train.steps={job.train.steps} and tokens={tokens} both say how long to train; give one of them",
            "option.conflict",
        )
    if total is None:
        total = job.train.steps * step if own else CHINCHILLA * job.model.parameter_count
    said = tokens is not None
    if not said and total < step:  # nobody asked
        total = step
    given = not said or batch is not None or kept is None or "train.batch" in kept
    choices = fit(recipe(job.model, workload.seq, total), workload.batch, workload.seq, total, given=given)
    steps = choices["train.steps"].value
    if kept is None:
        choices = {"train.steps": choices["train.steps"]} if said else {}
    elif job.optimizer.name != "adamw":  # the published rates and decays are Adam's
        theirs = ("optimizer.lr", "optimizer.betas", "optimizer.weight_decay")
        choices = {key: choice for key, choice in choices.items() if key not in theirs}
    return Training(job, total, steps, choices, kept, cluster, said)


def interval_reason(option: Option, run: GoodputRun) -> str:
    """Why this many steps lie between checkpoints."""
    size = f"{bytes_text(saved_bytes(option))} each, and the newest two are kept"
    if run.best == run.most:
        return f"steps: a tenth of the run; {size}"
    blocked, between = run.failures.blocked, days_text(run.failures.between / DAY)
    span = days_text(run.best * run.step / DAY)
    return (
        f"steps, {span}: the shortest expected run, if it fails once in {between} ({DEFAULT_FLEET.source}) and a save "
        f"holds the steps up for {blocked:.2g} s; {size}"
    )


def start(option: Option, path: str) -> str:
    """The command that runs the job."""
    if option.workload.cluster.nodes > 1:
        return f"fivefold launch {shlex.quote(path)} --slurm"
    ranks = f" --nproc {option.layout.world}" if option.layout.world > 1 else ""
    return f"fivefold train {shlex.quote(path)}{ranks}"


def expected_text(option: Option) -> str:
    """What a run should reach, to compare with its output."""
    workload, rate = option.workload, option.tokens_per_second
    each = f" ({rate / option.layout.world:,.0f} a rank)" if option.layout.world > 1 else ""
    return (
        f"{rate:,.0f} tokens/s{each}, MFU {workload.mfu(option.seconds):.1%}, {option.seconds:.3g} s a step"
        f"{range_text(option)}, "
        f"{option.footprint.total / GB:.1f} of {option.device_memory / GB:.1f} GB on the fullest rank, as planned."
    )


def range_text(option: Option) -> str:
    """Behind a step's seconds; empty where nothing is known of the device."""
    interval = step_range(option.workload)
    return f" ({interval.text(option.seconds)} {IN_WORDS})" if interval else ""


def _no_job(workload: Workload) -> str:
    """Of a precision that can be planned, and in which no run computes."""
    half = workload.precision == "fp16"
    without = [group.accelerator.name for group in workload.cluster.groups if group.accelerator.peak.bf16 is None]
    why = NO_FP16 if half else f"no setting makes it compute in {workload.precision}"
    nearest = "fp8" if workload.precision == "fp4" else "bf16" if half and not without else "fp32"
    older = f", as {without[0]} has no bf16" if half and without else ""
    return (
        f"precision={workload.precision} can be planned, and not trained in: {why}; nearest: precision={nearest}{older}"
    )


def _count(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
