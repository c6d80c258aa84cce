"""The result of `verify`: one layout in full, or a sweep with a row for each model and its degrees.

A heading of a table that begins with ">" is of a column that is aligned to the right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.cost.traffic import display_axis
from fivefold.layout.axes import AXES
from fivefold.render.blocks import Block, Cell, Result, Table, Text, mark
from fivefold.support.text import bytes_text, graphs_text
from fivefold.verifier.cases import LayoutCase
from fivefold.verifier.compare import ValueComparison, tolerance_of, worst_comparison
from fivefold.verifier.verdict import Verdict, in_axis_order

_MAX_FAILURES = 10  # failing layouts of a sweep that are printed with their problems
_MAX_STACK_LINES = 8  # the last lines of the stack trace of a rank that failed


@dataclass(frozen=True)
class VerifyResult(Result):
    verdicts: Sequence[tuple[LayoutCase, Verdict]]
    total: int | None = None  # how many layouts there are to sample from; None: one layout was asked for
    pair_coverage: float = 1.0  # of all pairs of two settings, the share that occurs in a layout of the sample

    @property
    def ok(self) -> bool:  # type: ignore[override]
        """Whether all layouts passed."""
        return not self.failed

    @property
    def failed(self) -> list[tuple[LayoutCase, Verdict]]:
        return [(case, verdict) for case, verdict in self.verdicts if not verdict.passed]

    @property
    def moe_count(self) -> int:
        """How many of the layouts are of a mixture of experts."""
        return sum(case.job.model.experts is not None for case, _ in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        rows = [verdict.to_dict() | {"variant": case.variant} for case, verdict in self.verdicts]
        if self.total is None:
            return rows[0]
        return {
            "passed": self.ok,
            "sampled": len(rows),
            "total": self.total,
            "pairs_met": round(self.pair_coverage, 4),
            "with_experts": self.moe_count,
            "failed": len(self.failed),
            "layouts": rows,
        }

    def blocks(self) -> Iterator[Block]:
        if self.total is None:
            yield from _single_layout(self.verdicts[0][1])
            return
        yield _summary_table(self.verdicts)
        failed = self.failed
        for case, verdict in failed[:_MAX_FAILURES]:
            yield Text(f"fails: {verdict.job.layout} {case.variant}".rstrip(), "bad")
            lines = (*verdict.problems, *verdict.details.splitlines()[-_MAX_STACK_LINES:])
            yield Text("\n".join(f"  {line}" for line in lines))
        if len(failed) > _MAX_FAILURES:
            yield Text(f"{len(failed) - _MAX_FAILURES} more fail; --json has them all")
        count, moe_count = len(self.verdicts), self.moe_count
        sampled = f"{count}/{self.total} layouts"
        if 0 < moe_count < count:
            sampled += f" ({count - moe_count} of dense models, {moe_count} of mixtures of experts)"
        if count < self.total:
            sampled += f", {self.pair_coverage:.0%} of all pairs of settings"
        if failed:
            yield Text(f"{sampled}: {len(failed)} fail", "bad")
        else:
            yield Text(f"{sampled}: all passed", "good")


# ---- one layout ----------------------------------------------------------------------------------------------------


def _single_layout(verdict: Verdict) -> Iterator[Block]:
    """Every step's loss and norm, the largest errors of tensors, what a step sends and what a rank holds."""
    job = verdict.job
    size = f"{job.model.name} ({job.model.layers} layers of {job.model.hidden}) in {job.train.dtype}"
    steps = f"{job.train.steps} steps of {job.train.batch} x {job.data.seq}"
    yield Text(f"{job.layout} against one process: {size}, {steps}", "bold")
    if verdict.broken:
        yield Text(verdict.details, "dim")
    else:
        yield _comparison_table(verdict)
        if verdict.traffic:
            yield from (Text(""), _traffic_table(verdict))
        if verdict.memory:
            yield from (Text(""), _memory_table(verdict))
        if (replayed := verdict.replayed) is not None:
            yield Text(
                "\nrouting replayed from the reference, since a rounding can decide between experts: "
                f"{replayed.mismatched} of {replayed.tokens} tokens of all layers and steps would have gone to others"
            )
        if verdict.graphs is not None:
            yield Text("\n" + graphs_text(*verdict.graphs, blocks=job.layout.compiles_blocks))
    for problem in verdict.problems:
        yield Text(f"fails: {problem}", "bad")
    if verdict.passed:
        yield Text(f"passed  in {verdict.seconds:.1f} s on {job.layout.world} ranks", "good")


def _comparison_table(verdict: Verdict) -> Table:
    rows: list[list[str | Cell]] = []
    tolerance = tolerance_of(verdict.job)
    for quantity, values in (("loss", verdict.losses), ("norm", verdict.norms)):
        comparisons = [comparison for comparison in verdict.comparisons if comparison.quantity == quantity]
        for comparison, (actual, expected) in zip(comparisons, values, strict=True):
            texts = (f"{actual:.10g}", f"{expected:.10g}", _error_text(comparison))
            rows.append([f"{quantity}, step {comparison.step}", *texts, mark(comparison.passed)])
    for quantity in ("gradient", "parameter", "bias"):
        if (worst := verdict.worst(quantity)) is not None:
            texts = (worst.name, f"step {worst.step}", _error_text(worst))
            rows.append([f"worst {quantity}", *texts, mark(worst.passed)])
            if worst.tolerance > tolerance:
                rows.append(["its tolerance", "", "", f"{worst.tolerance:.1e}"])
    for quantity in ("routing", "load"):
        if (worst := verdict.worst(quantity)) is not None:
            rows.append([quantity, "", "", _difference_text(worst), mark(worst.passed)])
    rows.append(["tolerance", "", "", f"{tolerance:.1e}"])
    return Table(["", ">layout", ">one process", ">error", ""], rows)


def _error_text(comparison: ValueComparison) -> str:
    return comparison.note or f"{comparison.error:.1e}"


def _difference_text(comparison: ValueComparison) -> str:
    """The error of a routing or a load, which counts tokens or experts."""
    if not comparison.passed:
        return "differs"
    return f"{comparison.error:.0f} tokens differ" if comparison.error else "equal"


def _traffic_table(verdict: Verdict) -> Table:
    steps, rows = verdict.job.train.steps, []
    for check in in_axis_order(verdict.traffic):
        counted, formula = check.counted, check.expected
        expected = f"{_per_step(formula.calls, steps)} calls, {_per_step(formula.payload, steps)} B"
        sizes = (bytes_text(counted.payload / steps), bytes_text(float(counted.wire) / steps))
        axis = display_axis(verdict.job.layout, counted.axis, counted.kind)
        texts = (_per_step(counted.calls, steps), *sizes, "the same" if check.passed else expected)
        rows.append([f"{axis}  {counted.kind}", *texts, mark(check.passed)])
    return Table(["sent, per step", ">calls", ">payload", ">wire", ">expected", ""], rows)


def _memory_table(verdict: Verdict) -> Table:
    rows = []
    for check in verdict.memory:
        text = (lambda n: f"{n:g}") if check.name == "microbatches in flight" else bytes_text
        name = check.name if check.passed else f"{check.name}, rank {check.rank}"
        expected = "the same" if check.passed else text(check.expected)
        rows.append([name, text(check.counted), expected, mark(check.passed)])
    return Table(["held by rank 0", ">counted", ">expected", ""], rows)


def _per_step(total: int, steps: int) -> str:
    return f"{total / steps:g}" if total < 1e6 * steps else f"{total / steps:.0f}"


# ---- many layouts --------------------------------------------------------------------------------------------------


def _summary_table(verdicts: Sequence[tuple[LayoutCase, Verdict]]) -> Table:
    """A row for each model and each dp x cp x tp x pp: how many of its layouts passed, and their largest errors."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for case, verdict in verdicts:
        layout = verdict.job.layout
        sizes = layout.degrees | {"ep": layout.ep}
        degrees = " ".join(f"{axis}={n}" for axis in AXES if (n := sizes.get(axis, 1)) > 1)
        groups.setdefault((case.variant or case.job.model.name, degrees or "dp=1"), []).append(verdict)
    rows = []
    for (model, degrees), group in groups.items():
        passed = sum(verdict.passed for verdict in group)
        comparisons = [comparison for verdict in group for comparison in verdict.comparisons]
        largest = [
            worst_comparison(comparison for comparison in comparisons if comparison.quantity == quantity)
            for quantity in ("gradient", "parameter")
        ]
        rows.append([
            model,
            degrees,
            Cell(f"{passed}/{len(group)}", "good" if passed == len(group) else "bad"),
            *("-" if comparison is None else _error_text(comparison) for comparison in largest),
            mark(all(check.passed for verdict in group for check in verdict.traffic)),
            mark(all(check.passed for verdict in group for check in verdict.memory)),
        ])  # fmt: skip
    return Table(["model", "ranks", ">passed", ">worst gradient", ">worst parameter", "traffic", "memory"], rows)
