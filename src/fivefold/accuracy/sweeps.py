"""Published sweeps of layouts: how close the choices of the planner and of rules of thumb come to the best layout.

sweeps().mean("planner"), sweeps().mean("least, tp")
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from fivefold.accuracy.cases import DATA, MeasuredRun, read_rows
from fivefold.accuracy.fit import FIT_STEPS_WITHOUT, by_source, predict_unseen
from fivefold.accuracy.mixture_rows import is_mixture
from fivefold.accuracy.result import Progress, step_counter
from fivefold.accuracy.score import SweepChoice, choices, evaluate
from fivefold.layout.layout import Layout
from fivefold.planner.closed_forms import RECOMPUTES
from fivefold.render.blocks import Block, Result, Table, Text

REGRET_NOISE = 0.03  # a smaller regret is within the noise of measured runs


class Rule(NamedTuple):
    """A rule of thumb that chooses among the layouts that ran, which it knows and the planner does not."""

    name: str
    why: str
    key: Callable[[MeasuredRun], tuple[int, ...]] | None  # the layout with the smallest; None: that of median speed


def _tie_break(run: MeasuredRun) -> tuple[int, ...]:
    """Among layouts that are otherwise equal, all rules prefer no recomputation and large microbatches."""
    return RECOMPUTES.index(run.workload.layout.recompute), -run.workload.samples


def _tp_first(run: MeasuredRun) -> tuple[int, ...]:
    layout, node = run.workload.layout, run.workload.cluster.groups[0].gpus
    return int(layout.tp > node), -layout.tp, layout.pp, layout.cp, *_tie_break(run)


def _model_parallel(run: MeasuredRun) -> tuple[int, ...]:
    layout: Layout = run.workload.layout
    return (layout.tp * layout.pp * layout.cp,)


def _least_by_tp(run: MeasuredRun) -> tuple[int, ...]:
    layout, node = run.workload.layout, run.workload.cluster.groups[0].gpus
    return *_model_parallel(run), int(layout.tp > node), -layout.tp, *_tie_break(run)


def _least_by_pp(run: MeasuredRun) -> tuple[int, ...]:
    return *_model_parallel(run), run.workload.layout.tp, *_tie_break(run)


PLANNER, PLANNER_TOLD = "planner", "told"
RULES = (
    Rule("tp first", "as much tp as a node has GPUs, then as little pp as fits", _tp_first),
    Rule("least, tp", "tp x pp as small as fits, tp rather than pp (arXiv 2104.04473, takeaways 1, 2)", _least_by_tp),
    Rule("least, pp", "the same, pp rather than tp: data parallelism and ZeRO do the rest", _least_by_pp),
    Rule("middle", "half of the layouts that ran are faster: what trying one at random gives", None),
)


@dataclass(frozen=True)
class SweepsResult(Result):
    """By sweep: how much longer a step takes than with the best measured layout, for the planner and for rules."""

    sweeps: tuple[SweepChoice, ...]

    @cached_property
    def regrets(self) -> list[dict[str, float]]:
        """For each sweep the regret by choice; infinite if the chosen layout ran out of memory."""
        return [
            {PLANNER: sweep.regret, PLANNER_TOLD: regret_if_told(sweep)}
            | {rule.name: regret_of(sweep, rule) for rule in RULES}
            for sweep in self.sweeps
        ]

    def of(self, name: str) -> list[float]:
        """The regrets of a choice in the sweeps in which the chosen layout ran."""
        return [row[name] for row in self.regrets if row[name] < float("inf")]

    def mean(self, name: str) -> float:
        return fmean(self.of(name))

    def to_dict(self) -> dict[str, Any]:
        return {
            "rules": {name: _figures(self.of(name)) for name in self.regrets[0]} if self.sweeps else {},
            "sweeps": [
                {
                    "source": sweep.best.row.file,
                    "sweep": sweep.name,
                    "tried": sweep.layouts,
                    "chosen": _layout(sweep.chosen.run),
                    "best": _layout(sweep.best.run),
                    "out_of_memory": sweep.out_of_memory,
                    "regret": {name: value if value < float("inf") else None for name, value in row.items()},
                }
                for sweep, row in zip(self.sweeps, self.regrets, strict=True)
            ],
        }

    def blocks(self) -> Iterator[Block]:
        if not self.sweeps:
            yield Text("no sweep: a sweep is three or more rows with one model, batch and cluster, and several layouts")
            return
        yield from (self._each(), self._by_source(), self._rules())
        failed = sum(sweep.out_of_memory for sweep in self.sweeps)
        yield Text(f"{len(self.sweeps)} sweeps; {failed} of the planner's choices ran out of memory")

    def _each(self) -> Table:
        rows = []
        for sweep, regrets in zip(self.sweeps, self.regrets, strict=True):
            row = sweep.best.row
            work = f"{row.file}: {row.text('model')}, {row.text('gpus')} GPUs, batch {row.text('global_batch')}"
            chosen = "the best" if sweep.chosen is sweep.best else _layout(sweep.chosen.run)
            cells = [f"{value:.1%}" if value < float("inf") else "out of memory" for value in regrets.values()]
            rows.append((work, str(sweep.layouts), _layout(sweep.best.run), chosen, *cells))
        heads = ["~sweep", ">tried", "~best measured", "~planner's choice", *(f">{name}" for name in self.regrets[0])]
        caption = "how much longer a step takes than with the best measured layout"
        return Table(heads, rows, title="Sweeps", caption=caption)

    def _by_source(self) -> Table:
        pairs = list(zip(self.sweeps, self.regrets, strict=True))
        by_source = {name: [row for sweep, row in pairs if sweep.best.row.file == name] for name in self.sources}
        by_nodes = {"one node": [row for sweep, row in pairs if _nodes(sweep) == 1]}
        by_nodes["several nodes"] = [row for sweep, row in pairs if _nodes(sweep) > 1]
        heads = ["source", ">sweeps", *(f">{name}" for name in self.regrets[0])]
        totals = [_means(name, rows) for name, rows in by_nodes.items() if rows]
        return Table(heads, [_means(name, rows) for name, rows in by_source.items()], "Mean by source", totals=totals)

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(sweep.best.row.file for sweep in self.sweeps))

    def _rules(self) -> Table:
        why = {PLANNER: "the shortest predicted step of the layouts that fit by prediction"}
        why[PLANNER_TOLD] = "the shortest predicted step of the layouts that ran, which it is told, as the rules are"
        why |= {rule.name: rule.why for rule in RULES}
        rows = []
        for name in self.regrets[0]:
            shares = (f"{value:.1%}" for value in _figures(self.of(name)).values())
            rows.append((name, *shares, why[name]))
        heads = ["choice", ">median", ">mean", ">worst", f">within {REGRET_NOISE:.0%}", "~chooses"]
        caption = "rules are told which layouts ran; layouts that a rule cannot tell apart count with their mean"
        return Table(heads, rows, title="Slower than the best measured layout", caption=caption)


def sweeps(
    data: str | Path | None = None,
    *,
    leave_out: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> SweepsResult:
    """All sweeps in a directory of measured runs, by default those of the package. With `leave_out`, the planner
    chooses with constants that were fitted without the sweep's source."""
    rows = read_rows(Path(data) if data else DATA)
    results = evaluate(rows, tick=step_counter(progress, "predicting", len(rows)))
    if leave_out:
        runs = [
            result.run for result in results if result.run and result.error is not None and not is_mixture(result.row)
        ]
        tick = step_counter(progress, "fitting without each source", FIT_STEPS_WITHOUT)
        seconds_unseen = {
            (run.row.file, run.row.line): seconds for run, seconds in predict_unseen(runs, by_source, tick)
        }
        results = [
            replace(result, seconds=seconds_unseen.get((result.row.file, result.row.line), result.seconds))
            for result in results
        ]
    return SweepsResult(tuple(choices(results)))


def regret_of(sweep: SweepChoice, rule: Rule) -> float:
    """How much longer a step takes than with the best layout if a rule chooses. Layouts that the rule cannot tell apart
    count with their mean."""
    runs = [tried.run for tried in sweep.tried if tried.error is not None and tried.run]
    times = {run.row.line: run.seconds or 0.0 for run in runs}
    if rule.key is None:
        chosen = [median(times.values())]
    else:
        least = min(map(rule.key, runs))
        chosen = [times[run.row.line] for run in runs if rule.key(run) == least]
    return fmean(chosen) / min(times.values()) - 1


def regret_if_told(sweep: SweepChoice) -> float:
    """The planner's regret if it is told which layouts ran, and need not predict what fits."""
    ran = [tried for tried in sweep.tried if tried.error is not None]
    return sweep._replace(chosen=min(ran, key=lambda tried: tried.seconds or 0.0)).regret


def _nodes(sweep: SweepChoice) -> int:
    return sweep.best.run.workload.cluster.nodes if sweep.best.run else 1


def _means(name: str, regrets: list[dict[str, float]]) -> list[str]:
    ran = {rule: [row[rule] for row in regrets if row[rule] < float("inf")] for rule in regrets[0]}
    return [name, str(len(regrets)), *(f"{fmean(values):.1%}" if values else "" for values in ran.values())]


def _figures(regrets: list[float]) -> dict[str, float]:
    near = fmean(value <= REGRET_NOISE for value in regrets)
    return {"median": median(regrets), "mean": fmean(regrets), "worst": max(regrets), "near": near}


def _layout(run: MeasuredRun | None) -> str:
    return str(run.workload.layout).partition(",split=")[0] if run else ""
