"""What `fivefold goodput` has found: days with failures, how often to save, and what slow ranks cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fivefold.plan.goodput.expected import daly, young
from fivefold.plan.goodput.failures import Costs, Input
from fivefold.plan.goodput.figures import DAY, FLEETS, HOUR, JITTER, JITTER_SOURCE, SLOW_SOURCE
from fivefold.plan.goodput.run import Run, length
from fivefold.plan.goodput.simulate import Simulated
from fivefold.plan.goodput.stragglers import Straggling
from fivefold.plan.interval import IN_WORDS, step_range
from fivefold.plan.search.option import Option
from fivefold.report import Block, Cell, Result, Table, Text
from fivefold.support.formatting import si

CAUSES = {
    "training": "steps that stay",
    "saves": "saves, where they block",
    "steps made again": "steps made again after failures",
    "failures": "failures: noticing, starting, loading",
}
HALF = HOUR / 2  # an interval that many take


@dataclass(frozen=True)
class GoodputResult(Result):
    """A planned run under failures. `run` is saved as asked, or else as is best; `simulated` is many of it."""

    option: Option
    tokens: int
    run: Run
    given: bool  # whether the user said how often to save
    costs: Costs
    simulated: Simulated
    runs: int
    seed: int
    inputs: tuple[Input, ...]
    straggling: tuple[Straggling, ...]
    jitter: float

    @property
    def goodput(self) -> float:
        """The expected share of the time that trains."""
        return self.run.work / self.run.expected

    def saved_every(self, steps: int) -> Run:
        return replace(self.run, every=steps)

    @property
    def intervals(self) -> dict[str, Run]:
        """The run by how often it is saved."""
        found = {"given": self.run} if self.given else {}
        found |= {"the best": self.saved_every(self.run.best)}
        it = self.run.failures
        others = {"Young, sqrt(2 b M)": young(it), "Daly": daly(it), "half an hour": HALF}
        steps = {name: max(1, round(seconds / self.run.step)) for name, seconds in others.items()}
        return found | {name: self.saved_every(many) for name, many in steps.items() if many <= self.run.most}

    @property
    def fleets(self) -> dict[str, Run]:
        """The run with others' failures, each saved as is best then; the user's own figure has no others."""
        found = {}
        for fleet in FLEETS if self.costs.mtbf is None else ():
            between = fleet.hours * HOUR / self.option.layout.world
            run = replace(self.run, failures=self.run.failures._replace(between=between))
            found[fleet.name] = run if self.given else replace(run, every=run.best)
        return found

    def to_dict(self) -> dict[str, Any]:
        low, median, high = self.run.days(self.simulated)
        found = step_range(self.option.case)
        return {
            "model": self.option.case.spec.name,
            "cluster": str(self.option.case.cluster),
            "layout": str(self.option.layout),
            "tokens": self.tokens,
            "steps": self.run.steps,
            "step_seconds": self.run.step,
            "days_without_failures": self.run.work / DAY,
            "expected_days": self.run.expected / DAY,
            "days": {"p10": low, "median": median, "p90": high},
            "days_range": [end / DAY for end in found.around(self.run.expected)] if found else None,
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
            "inputs": [one._asdict() for one in self.inputs],
            "stragglers": {"deviation": self.jitter, "ranks": [one.to_dict() for one in self.straggling]},
        }

    def blocks(self) -> Iterator[Block]:
        case, run = self.option.case, self.run
        yield Text(
            f"{case.spec.name} on {case.cluster}, {self.option.layout}: {si(self.tokens, 4)} tokens, {run.steps:,} "
            f"steps of {run.step:.3g} s"
        )
        low, median, high = run.days(self.simulated)
        yield Text(
            f"{length(run.work / DAY)} without failures; with them {length(low)} to {length(high)} (p10 to p90), "
            f"median {length(median)}: goodput {self.goodput:.1%}",
            "bold",
        )
        if found := step_range(case):
            days = " to ".join(length(end / DAY) for end in found.around(run.expected))
            yield Text(
                f"that is chance alone; the planned step itself is {found.text(run.step)} s {IN_WORDS}, so {days}"
            )
        yield self._parts()
        yield self._intervals()
        if fleets := self.fleets:
            rows = [
                (name, length(one.failures.between / DAY), f"{one.every:,}", _share(one), length(one.expected / DAY))
                for name, one in fleets.items()
            ]
            heads = ["~whose GPUs", ">the job fails in", ">steps between saves", ">goodput", ">run"]
            yield Table(heads, rows, "With the failures that others have counted")
        yield self._stragglers()
        rests = [(one.name, f"{_number(one.value)} {one.unit}", one.source) for one in self.inputs]
        yield Table(["input", ">value", "~where it comes from"], rests, "What this rests on")

    def _parts(self) -> Table:
        total = float(self.simulated.seconds.mean())
        rows = [
            (CAUSES[cause], length(part / DAY), f"{part / total:.1%}") for cause, part in self.simulated.parts.items()
        ]
        caption = (
            f"means of {self.runs:,} simulated runs (seed {self.seed}), {self.simulated.failures.mean():,.1f} failures "
            f"each; expected by formula: {length(self.run.expected / DAY)}"
        )
        return Table(
            ["what the time goes into", ">time", ">share"], rows, "Time", caption, [("total", length(total / DAY))]
        )

    def _intervals(self) -> Table:
        least = self.saved_every(self.run.best).expected
        rows = []
        for name, run in self.intervals.items():
            more = f"{max(0.0, run.expected / least - 1):.2%}" if run.expected < 1e3 * least else "no end"
            mine = run.every == self.run.every
            cells = (name, f"{run.every or run.steps:,}", length(run.interval / DAY), _share(run), more)
            rows.append([Cell(text, "bold" if mine else "") for text in cells])
        heads = ["between saves", ">steps", ">time", ">goodput", ">longer than the best"]
        waits = self.run.failures.writing > self.run.interval + self.run.failures.blocked
        caption = "bold: this run; at most a tenth of it lies between saves"
        caption += "; a save waits until the one before is written" if waits else ""
        return Table(heads, rows, "How often to save", caption)

    def _stragglers(self) -> Table:
        rows = [
            (f"{one.ranks:,}", f"{one.jitter:.1%}", f"{one.chance:.1%}", f"{one.slow:.1%}") for one in self.straggling
        ]
        source = f" ({JITTER_SOURCE})" if self.jitter == JITTER else ""
        caption = (
            f"jitter: a rank's step varies by {self.jitter:.2%} of its mean{source}, and all wait for the slowest; "
            f"slow machines: {SLOW_SOURCE}, until they are found. Neither is added to the days above: the measured "
            "runs by which the planner is judged contain what they had of it"
        )
        heads = [">ranks", ">jitter makes a step longer by", ">slow machine among them", ">costs on average"]
        return Table(heads, rows, "What uneven ranks cost", caption)


def _figures(run: Run) -> dict[str, float]:
    return {
        "hours_between_failures": run.failures.between / HOUR,
        "every": run.every,
        "expected_days": run.expected / DAY,
        "goodput": run.work / run.expected,
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _share(run: Run) -> str:
    return f"{run.work / run.expected:.1%}"
