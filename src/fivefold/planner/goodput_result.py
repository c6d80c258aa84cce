"""Goodput as a function: how long a run takes with failures, how often to save it, what uneven ranks cost.

goodput("llama3-405b", "2048x8xH100", tokens="15.6T").goodput
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.planner.checkpoint_interval import daly_interval, young_interval
from fivefold.planner.error_range import IN_WORDS, step_range
from fivefold.planner.failure_costs import (
    DAY,
    FLEETS,
    HOUR,
    JITTER_SOURCE,
    SLOW_SOURCE,
    STEP_JITTER,
    FailureCosts,
    Input,
    failure_inputs,
)
from fivefold.planner.failure_simulation import SIMULATED_RUNS, SimulatedRuns
from fivefold.planner.goodput import GoodputRun, Straggling, days_text, expected_straggling
from fivefold.planner.option import Option
from fivefold.planner.plan import plan
from fivefold.planner.result import too_large
from fivefold.planner.training import CHINCHILLA_BUDGET
from fivefold.render.blocks import Block, Cell, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_STEPS, check_range, misfit, within
from fivefold.support.text import si

# ---- result ---------------------------------------------------------------------------------------------------------
# What `fivefold goodput` has found: days with failures, how often to save, and what slow ranks cost.


CAUSE_NAMES = {
    "training": "steps that stay",
    "saves": "saves, where they block",
    "steps made again": "steps made again after failures",
    "failures": "failures: noticing, starting, loading",
}
HALF_HOUR = HOUR / 2  # an interval that many take


@dataclass(frozen=True)
class GoodputResult(Result):
    """A planned run under failures. `run` saves as asked, or else as is best; `simulated` has many of it."""

    option: Option
    tokens: int
    run: GoodputRun
    given: bool  # whether the user said how often to save
    costs: FailureCosts
    simulated: SimulatedRuns
    runs: int
    seed: int
    inputs: tuple[Input, ...]
    straggling: tuple[Straggling, ...]
    jitter: float

    @property
    def goodput(self) -> float:
        """The expected share of the time that trains."""
        return self.run.work / self.run.expected

    def saved_every(self, steps: int) -> GoodputRun:
        return replace(self.run, every=steps)

    @property
    def intervals(self) -> dict[str, GoodputRun]:
        """The run by how often it is saved."""
        runs = {"given": self.run} if self.given else {}
        runs |= {"the best": self.saved_every(self.run.best)}
        failures = self.run.failures
        others = {
            "Young, sqrt(2 b M)": young_interval(failures),
            "Daly": daly_interval(failures),
            "half an hour": HALF_HOUR,
        }
        steps = {name: max(1, round(seconds / self.run.step)) for name, seconds in others.items()}
        return runs | {name: self.saved_every(many) for name, many in steps.items() if many <= self.run.most}

    @property
    def fleets(self) -> dict[str, GoodputRun]:
        """The run with others' failures, each saved as is best then; the user's own figure has no others."""
        runs = {}
        for fleet in FLEETS if self.costs.mtbf is None else ():
            between = fleet.hours * HOUR / self.option.layout.world
            run = replace(self.run, failures=self.run.failures._replace(between=between))
            runs[fleet.name] = run if self.given else replace(run, every=run.best)
        return runs

    def to_dict(self) -> dict[str, Any]:
        low, median, high = self.run.days(self.simulated)
        planned = step_range(self.option.workload)
        return {
            "model": self.option.workload.spec.name,
            "cluster": str(self.option.workload.cluster),
            "layout": str(self.option.layout),
            "tokens": self.tokens,
            "steps": self.run.steps,
            "step_seconds": self.run.step,
            "days_without_failures": self.run.work / DAY,
            "expected_days": self.run.expected / DAY,
            "days": {"p10": low, "median": median, "p90": high},
            "days_range": [end / DAY for end in planned.around(self.run.expected)] if planned else None,
            "goodput": self.goodput,
            "simulated": {
                "runs": self.runs,
                "seed": self.seed,
                "mean_days": float(self.simulated.seconds.mean()) / DAY,
                "mean_failures": float(self.simulated.failures.mean()),
                "days_by_cause": {cause: part / DAY for cause, part in self.simulated.parts.items()},
            },
            "checkpoint_every": self.run.every,
            "best_checkpoint_every": self.run.best,
            "intervals": {name: _figures(run) for name, run in self.intervals.items()},
            "failures_of": {name: _figures(run) for name, run in self.fleets.items()},
            "inputs": [figure._asdict() for figure in self.inputs],
            "stragglers": {"deviation": self.jitter, "ranks": [cost.to_dict() for cost in self.straggling]},
        }

    def blocks(self) -> Iterator[Block]:
        workload, run = self.option.workload, self.run
        yield Text(
            f"{workload.spec.name} on {workload.cluster}, {self.option.layout}: {si(self.tokens, 4)} tokens, "
            f"{run.steps:,} steps of {run.step:.3g} s"
        )
        low, median, high = run.days(self.simulated)
        yield Text(
            f"{days_text(run.work / DAY)} without failures; with them {days_text(low)} to {days_text(high)} "
            f"(p10 to p90), median {days_text(median)}: goodput {self.goodput:.1%}",
            "bold",
        )
        if planned := step_range(workload):
            days = " to ".join(days_text(end / DAY) for end in planned.around(run.expected))
            yield Text(
                f"that is chance alone; the planned step itself is {planned.text(run.step)} s {IN_WORDS}, so {days}"
            )
        yield self._parts()
        yield self._intervals()
        if fleets := self.fleets:
            rows = [
                (
                    name,
                    days_text(run.failures.between / DAY),
                    f"{run.every:,}",
                    _share(run),
                    days_text(run.expected / DAY),
                )
                for name, run in fleets.items()
            ]
            heads = ["~whose GPUs", ">the job fails in", ">steps between saves", ">goodput", ">run"]
            yield Table(heads, rows, "With the failures that others have counted")
        yield self._stragglers()
        rests = [(figure.name, f"{_number(figure.value)} {figure.unit}", figure.source) for figure in self.inputs]
        yield Table(["input", ">value", "~where it comes from"], rests, "What this rests on")

    def _parts(self) -> Table:
        total = float(self.simulated.seconds.mean())
        rows = [
            (CAUSE_NAMES[cause], days_text(part / DAY), f"{part / total:.1%}")
            for cause, part in self.simulated.parts.items()
        ]
        caption = (
            f"means of {self.runs:,} simulated runs (seed {self.seed}), {self.simulated.failures.mean():,.1f} failures "
            f"each; expected by formula: {days_text(self.run.expected / DAY)}"
        )
        return Table(
            ["what the time goes into", ">time", ">share"], rows, "Time", caption, [("total", days_text(total / DAY))]
        )

    def _intervals(self) -> Table:
        least = self.saved_every(self.run.best).expected
        rows = []
        for name, run in self.intervals.items():
            more = f"{max(0.0, run.expected / least - 1):.2%}" if run.expected < 1e3 * least else "no end"
            this = run.every == self.run.every
            cells = (name, f"{run.every or run.steps:,}", days_text(run.interval / DAY), _share(run), more)
            rows.append([Cell(text, "bold" if this else "") for text in cells])
        heads = ["between saves", ">steps", ">time", ">goodput", ">longer than the best"]
        waits = self.run.failures.writing > self.run.interval + self.run.failures.blocked
        caption = "bold: this run; at most a tenth of it lies between saves"
        caption += "; a save waits until the one before is written" if waits else ""
        return Table(heads, rows, "How often to save", caption)

    def _stragglers(self) -> Table:
        rows = [
            (f"{cost.ranks:,}", f"{cost.jitter:.1%}", f"{cost.chance:.1%}", f"{cost.slow:.1%}")
            for cost in self.straggling
        ]
        source = f" ({JITTER_SOURCE})" if self.jitter == STEP_JITTER else ""
        caption = (
            f"jitter: a rank's step varies by {self.jitter:.2%} of its mean{source}, and all wait for the slowest; "
            f"slow machines: {SLOW_SOURCE}, until they are found. Neither is added to the days above: the measured "
            "runs by which the planner is judged contain what they had of it"
        )
        heads = [">ranks", ">jitter makes a step longer by", ">slow machine among them", ">costs on average"]
        return Table(heads, rows, "What uneven ranks cost", caption)


def _figures(run: GoodputRun) -> dict[str, float]:
    return {
        "hours_between_failures": run.failures.between / HOUR,
        "every": run.every,
        "expected_days": run.expected / DAY,
        "goodput": run.work / run.expected,
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _share(run: GoodputRun) -> str:
    return f"{run.work / run.expected:.1%}"


# ---- goodput --------------------------------------------------------------------------------------------------------


FEW, MANY = 16, 16_384  # ranks, between which jobs lie
MOST_RUNS, SEEDS = 100_000, 2**63


def goodput(
    model: str | Path | ModelSpec | Job,
    cluster: str | Path | Cluster | None = None,
    *,
    changes: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    tokens: str | float | None = None,
    layout: str | Layout | None = None,
    fix: str | Mapping[str, Any] = "",
    precision: str = "",
    software: str = "fivefold",
    every: int | None = None,
    mtbf: float | None = None,
    detect: float | None = None,
    restart: float | None = None,
    storage: float | None = None,
    save: float | None = None,
    jitter: float | None = None,
    runs: int = SIMULATED_RUNS,
    seed: int = 0,
) -> GoodputResult:
    """Days to train with failures: expected, and as a distribution of seeded simulated runs.

        >>> run = ff.goodput("llama3-8b", "8xH100", tokens="1.4T", mtbf=50_000, every=500)
        >>> print(f"{run.goodput:.1%} of the time trains")
        99.9% of the time trains

    The run is what `plan` makes of the same `model`, `cluster`, `changes`, `batch`, `seq`, `layout`, `fix`, `precision`
    and `software`; `tokens` are 20 per parameter where neither they nor the job say.
    `every` counts steps between checkpoints; without it, and where the job does not say, they are those of the shortest
    run. `mtbf` is hours between failures of one GPU, `detect` and `restart` are seconds, `storage` is GB a second of
    all nodes together, `save` the seconds that a save blocks steps: published or measured where not given. `jitter` is
    the deviation of a rank's step as a share of its mean. The distribution is over `runs`, whose failures a `seed`
    draws.
    """
    costs = FailureCosts(mtbf, detect, restart, storage, save)
    costs.check()
    jitter = STEP_JITTER if jitter is None else jitter
    _check_options(every, runs, seed, jitter)
    own = isinstance(model, Job) or str(model).endswith(".toml") or any("train.steps=" in change for change in changes)
    planned = plan(
        model, cluster, changes=changes, batch=batch, seq=seq, layout=layout, fix=fix, precision=precision,
        software=software, tokens=CHINCHILLA_BUDGET if tokens is None and not own else tokens,
    )  # fmt: skip
    option, training = planned.explained, planned.training
    if not option.fits:
        raise UserError(
            f"{option.layout}: {too_large(option)}; nearest: layout={planned.chosen.layout}", "search.memory"
        )
    run = training.run(option, costs, every)
    simulated = run.simulated(runs, seed)
    if simulated is None:
        raise UserError(_no_end(run), "goodput.end")
    world, machine = option.layout.world, option.workload.cluster.groups[0].gpus
    return GoodputResult(
        option=option,
        tokens=training.tokens,
        run=run,
        given=run.every != run.best,
        costs=costs,
        simulated=simulated,
        runs=runs,
        seed=seed,
        inputs=tuple(failure_inputs(option, costs, run.failures)),
        straggling=tuple(expected_straggling(ranks, machine, jitter) for ranks in sorted({FEW, world, MANY})),
        jitter=jitter,
    )


def _check_options(every: int | None, runs: int, seed: int, jitter: float) -> None:
    check_range("every", every, within(1, MAX_STEPS))
    check_range("runs", runs, within(10, MOST_RUNS))
    check_range("seed", seed, within(0, SEEDS))
    if wrong := misfit("jitter", jitter, within(0, 1)):
        raise UserError(wrong, "option.range")


def _no_end(run: GoodputRun) -> str:
    """Why failures leave no progress, and what would."""
    between, down, interval = (
        days_text(each / DAY) for each in (run.failures.between, run.failures.down, run.interval)
    )
    return (
        f"the job fails once in {between}, needs {down} to run again and has {interval} from save to save, so it comes "
        "to no end; take fewer GPUs, save more often, or start again sooner"
    )
