"""What `verify` found: one layout in full, or a sweep with a row for each model and its degrees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.cost.traffic import display_axis
from fivefold.layout.axes import AXES
from fivefold.render.blocks import Block, Cell, Result, Table, Text, mark
from fivefold.support.text import bytes_text, graphs_text
from fivefold.verifier.cases import LayoutCase
from fivefold.verifier.compare import Error, bound_of, worst
from fivefold.verifier.verdict import Verdict, in_axis_order

_SHOWN = 10  # failing layouts of a sweep that are told in full
_STACK = 8  # lines of the stack of a rank that failed


@dataclass(frozen=True)
class VerifyResult(Result):
    judged: Sequence[tuple[LayoutCase, Verdict]]
    total: int | None = None  # layouts that there are, of which these are a sample; None: one layout was asked for
    pairs_met: float = 1.0  # the share of all pairs of settings that the sample has

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return not self.failing

    @property
    def failing(self) -> list[tuple[LayoutCase, Verdict]]:
        return [(case, verdict) for case, verdict in self.judged if not verdict.passed]

    @property
    def with_experts(self) -> int:
        return sum(case.job.model.experts is not None for case, _ in self.judged)

    def to_dict(self) -> dict[str, Any]:
        rows = [verdict.to_dict() | {"variant": case.variant} for case, verdict in self.judged]
        if self.total is None:
            return rows[0]
        counts = {"sampled": len(rows), "total": self.total, "pairs_met": round(self.pairs_met, 4)}
        counts["with_experts"] = self.with_experts
        return {"passed": self.ok, **counts, "failed": len(self.failing), "layouts": rows}

    def blocks(self) -> Iterator[Block]:
        if self.total is None:
            yield from _single_layout(self.judged[0][1])
            return
        yield _summary(self.judged)
        failing = self.failing
        for case, verdict in failing[:_SHOWN]:
            yield Text(f"fails: {verdict.job.layout} {case.variant}".rstrip(), "bad")
            yield Text("\n".join(f"  {line}" for line in (*verdict.problems, *verdict.details.splitlines()[-_STACK:])))
        if (more := len(failing) - _SHOWN) > 0:
            yield Text(f"{more} more fail; --json has them all")
        sampled = f"{len(self.judged)}/{self.total} layouts"
        if 0 < (mixtures := self.with_experts) < len(self.judged):
            sampled += f" ({len(self.judged) - mixtures} of dense models, {mixtures} of mixtures of experts)"
        pairs = "" if len(self.judged) == self.total else f", {self.pairs_met:.0%} of all pairs of settings"
        yield Text(
            f"{sampled}{pairs}: {f'{len(failing)} fail' if failing else 'all hold'}", "bad" if failing else "good"
        )


# ---- one layout ----------------------------------------------------------------------------------------------------


def _single_layout(verdict: Verdict) -> Iterator[Block]:
    """Every step's loss and norm, the worst tensors, what a step sends and what a rank holds."""
    job = verdict.job
    size = f"{job.model.name} ({job.model.layers} layers of {job.model.hidden}) in {job.train.dtype}"
    steps = f"{job.train.steps} steps of {job.train.batch} x {job.data.seq}"
    yield Text(f"{job.layout} against one process: {size}, {steps}", "bold")
    if verdict.broken:
        yield Text(verdict.details, "dim")
    else:
        yield _compared(verdict)
        if verdict.traffic:
            yield from (Text(""), _traffic(verdict))
        if verdict.memory:
            yield from (Text(""), _memory(verdict))
        if verdict.replayed is not None:
            tokens, strays = verdict.replayed
            yield Text(
                f"\nrouting replayed from the reference, since a rounding can decide between experts: {strays} of "
                f"{tokens} tokens of all layers and steps would have gone to others"
            )
        if verdict.graphs is not None:
            yield Text("\n" + graphs_text(*verdict.graphs, blocks=job.layout.compiles_blocks))
    for problem in verdict.problems:
        yield Text(f"fails: {problem}", "bad")
    if verdict.passed:
        yield Text(f"holds  in {verdict.seconds:.1f} s on {job.layout.world} ranks", "good")


def _compared(verdict: Verdict) -> Table:
    rows: list[list[str | Cell]] = []
    bound = bound_of(verdict.job)
    for what, pairs in (("loss", verdict.losses), ("norm", verdict.norms)):
        errors = [error for error in verdict.errors if error.what == what]
        for error, (actual, expected) in zip(errors, pairs, strict=True):
            numbers = (f"{actual:.10g}", f"{expected:.10g}", _size(error))
            rows.append([f"{what}, step {error.step}", *numbers, mark(error.holds)])
    for what in ("gradient", "parameter", "bias"):
        if (worst := verdict.worst(what)) is not None:
            rows.append([f"worst {what}", worst.name, f"step {worst.step}", _size(worst), mark(worst.holds)])
            if worst.bound > bound:
                rows.append(["allowed for it", "", "", f"{worst.bound:.1e}"])
    for what in ("routing", "load"):
        if (worst := verdict.worst(what)) is not None:
            text = "differs" if not worst.holds else f"{worst.value:.0f} tokens differ" if worst.value else "equal"
            rows.append([what, "", "", text, mark(worst.holds)])
    rows.append(["allowed", "", "", f"{bound:.1e}"])
    return Table(["", ">layout", ">one process", ">error", ""], rows)


def _size(error: Error) -> str:
    return error.note or f"{error.value:.1e}"


def _traffic(verdict: Verdict) -> Table:
    steps, rows = verdict.job.train.steps, []
    for check in in_axis_order(verdict.traffic):
        counted, formula = check.counted, check.expected
        expected = f"{_per(formula.calls, steps)} calls, {_per(formula.payload, steps)} B"
        sizes = (bytes_text(counted.payload / steps), bytes_text(float(counted.wire) / steps))
        axis = display_axis(verdict.job.layout, counted.axis, counted.kind)
        same = "the same" if check.holds else expected
        rows.append([f"{axis}  {counted.kind}", _per(counted.calls, steps), *sizes, same, mark(check.holds)])
    return Table(["sent, per step", ">calls", ">payload", ">wire", ">expected", ""], rows)


def _memory(verdict: Verdict) -> Table:
    rows = []
    for check in verdict.memory:
        text = (lambda n: f"{n:g}") if check.name == "microbatches in flight" else bytes_text
        name = check.name if check.holds else f"{check.name}, rank {check.rank}"
        expected = "the same" if check.holds else text(check.expected)
        rows.append([name, text(check.counted), expected, mark(check.holds)])
    return Table(["held by rank 0", ">counted", ">expected", ""], rows)


def _per(total: int, steps: int) -> str:
    return f"{total / steps:g}" if total < 1e6 * steps else f"{total / steps:.0f}"


# ---- many layouts --------------------------------------------------------------------------------------------------


def _summary(judged: Sequence[tuple[LayoutCase, Verdict]]) -> Table:
    """A row for each model and each dp x cp x tp x pp: how many of its layouts hold, and the worst of them."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for case, verdict in judged:
        layout = verdict.job.layout
        sizes = layout.degrees | {"ep": layout.ep}
        degrees = " ".join(f"{axis}={n}" for axis in AXES if (n := sizes.get(axis, 1)) > 1)
        groups.setdefault((case.variant or case.job.model.name, degrees or "dp=1"), []).append(verdict)
    rows = []
    for (model, degrees), verdicts in groups.items():
        held = sum(verdict.passed for verdict in verdicts)
        errors = [worst(e for v in verdicts for e in v.errors if e.what == what) for what in ("gradient", "parameter")]
        rows.append([
            model,
            degrees,
            Cell(f"{held}/{len(verdicts)}", "good" if held == len(verdicts) else "bad"),
            *(_size(error) if error else "-" for error in errors),
            mark(all(check.holds for verdict in verdicts for check in verdict.traffic)),
            mark(all(check.holds for verdict in verdicts for check in verdict.memory)),
        ])  # fmt: skip
    return Table(["model", "ranks", ">hold", ">worst gradient", ">worst parameter", "traffic", "memory"], rows)
