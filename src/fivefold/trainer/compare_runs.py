"""Two runs side by side: where they part, by how much, and which setting or version differs.

compare_runs("runs/before", "runs/after").parted      # the figures that part, the first first
"""

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text as RichText

from fivefold.job.config import RunConfig
from fivefold.job.resume_rules import text_of
from fivefold.render.blocks import Block, Drawing, Result, Table, Text
from fivefold.render.chart import TOP, Plot, legend, sheet
from fivefold.render.scene import BLUE, GREY, INK, LABEL, MARGIN, ORANGE, WIDTH, Curve, Scene
from fivefold.render.scene import TextMark as Words
from fivefold.support.errors import UserError
from fivefold.support.storage_place import RemotePlace, place_of
from fivefold.support.text import first_of_many, plural
from fivefold.trainer.outputs import chart, drawable
from fivefold.trainer.parting import ComparedFigure, ComparedFigures, Difference
from fivefold.trainer.records import DIGESTS_FILE, METRICS_FILE, Digests, Record, Step, StepDecision, read
from fivefold.trainer.run_settings import Setting, bits_expected, differing, dtype_of_both, told

_MAX_ROWS = 8  # parameters of a table
_SIDES = ("A", "B")  # what the two are called below their paths, which may be long
_EFFECTS = {"nothing": "no figure", "rounding": "rounding"}


@dataclass(frozen=True)
class RunsResult(Result):
    directories: tuple[Path, Path]
    steps: tuple[list[Step], list[Step]]
    figures: ComparedFigures
    settings: list[Setting]  # and versions, that differ
    bits: bool  # nothing that the files say would have the two round otherwise
    notes: list[str]

    @property
    def common(self) -> list[tuple[Step, Step]]:
        """The records of the steps that both have."""
        second = {record.step: record for record in self.steps[1]}
        return [(record, second[record.step]) for record in self.steps[0] if record.step in second]

    @property
    def parted(self) -> list[ComparedFigure]:
        """The figures that differ by more than rounding, the one that does so first first."""
        return self.figures.parted

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return not self.parted

    @property
    def first(self) -> ComparedFigure | None:
        return self.parted[0] if self.parted else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "runs": [str(directory) for directory in self.directories],
            "steps": [len(steps) for steps in self.steps],
            "compared": [self.common[0][0].step, self.common[-1][0].step],
            "digests": self.figures.digested,
            "same": not any(figure.first for figure in self.figures),
            "bits_expected": self.bits,
            "parted": [_figure_dict(figure) for figure in self.parted],
            "figures": [_figure_dict(figure) for figure in self.figures if figure.first is not None],
            "settings": [
                {"name": setting.name, "values": list(setting.values), "effect": setting.effect}
                for setting in self.settings
            ],
            "losses": [
                {"step": a.step, "a": a.loss, "b": b.loss, "relative": _finite(self.figures.loss.relative[a.step])}
                for a, b in self.common
            ],
            "notes": self.notes,
        }

    # ---- text --------------------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Block]:
        common = self.common
        for side, directory, steps in zip(_SIDES, self.directories, self.steps, strict=True):
            yield Text(f"{side}  {directory}: steps {steps[0].step} to {steps[-1].step}")
        yield Text(self.verdict, "good" if self.ok else "bad")
        yield Text(self._reason())
        if any(figure.first for figure in self.figures):
            yield Drawing(self._drawn)
            yield self._figures_table()
        if names := [figure for figure in self.parted if figure.kind == "parameter"]:
            yield _parameters_table(names)
        if effective := [setting for setting in self.settings if setting.effect != "nothing"]:
            rows = [[it.name, *map(_value_text, it.values), it.effect] for it in effective]
            yield Table(["setting or version", "~A", "~B", "can change"], rows, title="What differs in how they run")
        else:
            yield Text("No setting and no version differs that could change a figure.")
        if without := [setting.name for setting in self.settings if setting.effect == "nothing"]:
            yield Text(f"Without effect: {first_of_many(without, 6)}")
        if len(common) < max(map(len, self.steps)):
            yield Text(f"Compared are steps {common[0][0].step} to {common[-1][0].step}, which both have.")
        yield from map(Text, self.notes)

    @property
    def verdict(self) -> str:
        common, figure = self.common, self.first
        if figure is None:
            largest = self.figures.loss.largest
            if not any(one.first for one in self.figures):
                of = "loss, gradient norm and every parameter" if self.figures.digested else "loss and gradient norm"
                return f"A and B are the same to the bit in {plural(len(common), 'step')}: {of}"
            by = f"by at most {_size(largest)} of the larger, in step {largest.step}" if largest else "in no bit"
            return f"A and B differ by rounding alone: their losses differ {by}"
        assert figure.parted is not None
        step = f"in step {figure.parted.step}" if figure.parted.step else "before their first step"
        return f"A and B part {step}: {self._what(figure, figure.parted)}"

    def _what(self, figure: ComparedFigure, parted: Difference) -> str:
        """What differs where they part."""
        size = _size(parted)
        if figure.kind == "samples":
            return "it trains on other samples, or on other tokens of them"
        if figure.kind == "rate":
            return f"its learning rates differ by {size} of the larger"
        if figure.kind == "loss":
            return f"its losses differ by {size} of the larger, before its update"
        if figure.kind == "norm":
            return f"its gradient norms differ by {size} of the larger, before its update"
        if figure.kind == "copies":
            return f"after it not all {figure.name} hold the same bits"
        alike = [one for one in self.parted if one.kind == "parameter" and one.order[0] == parted.step]
        more = f", and {plural(len(alike) - 1, 'other parameter')}" if len(alike) > 1 else ""
        when = "after it " if parted.step else ""
        return f"{when}{figure.name} differs by {size} of its norm{more}"

    def _reason(self) -> str:
        """Why a difference counts as rounding, or does not."""
        figure = self.first
        if self.bits:
            if figure is None:
                return "Nothing in their files says that they would round otherwise: any other bit would be told."
            return (
                "Nothing in job.toml and environment.json says that the two would round otherwise, so that no "
                "difference is rounding."
            )
        if figure is not None and self.figures.proven and figure.kind in ("parameter", "copies"):
            return "Before it their weights were the same to the bit, so that no difference of them is rounding."
        sizes = ", ".join(f"{name} {floor:.0e}" for name, floor in self.figures.floors.items())
        rule = f"rounding makes relative differences of up to {sizes} at once, and lets none grow 30-fold in a step"
        return f"The two round otherwise, or do not say how they do; {rule}."

    def _figures_table(self) -> Table:
        rows = []
        figures = self.figures
        named = [figures.samples, figures.rate, figures.loss, figures.norm, *figures.copies.values()]
        # Of parameters, the one that parts first, or the one that differs most.
        of_parameters = [one for one in figures.parameters.values() if one.largest is not None]
        parted = [one for one in self.parted if one.kind == "parameter"]
        if of_parameters:
            named.append(parted[0] if parted else max(of_parameters, key=lambda one: one.largest.relative))  # type: ignore[union-attr]
        for one in named:
            if one.first is None:
                continue
            assert one.largest is not None
            counted = one.kind in ("samples", "copies")
            cells = [
                cell
                for found in (one.first, one.parted, one.largest)
                for cell in ((str(found.step), "" if counted else _size(found)) if found else ("", ""))
            ]
            rows.append([one.name, *cells])
        heads = ["~figure", ">differs in", ">by", ">parts in", ">by", ">most in", ">by"]
        return Table(heads, rows, caption="By: relative to the larger of the two; of parameters, to the norm.")

    def _drawn(self, width: int, colour: bool) -> RichText:
        """Both losses, and below them the digits in which they agree."""
        first, second = ([one.loss for one in side] for side in zip(*self.common, strict=True))
        room = max(20, min(72, width - 10))
        if sum(a is not None and b is not None for a, b in zip(first, second, strict=True)) < 2:
            return RichText("fewer than two steps have a loss in both")
        rows = ["loss of A and of B", *chart(first, {}, room, 8, second)]
        if any(value is not None for value in self._digits()):
            rows += ["power of ten of their relative distance; a gap: the same", *chart(self._digits(), {}, room, 5)]
        return RichText("\n".join(rows))

    def _digits(self) -> list[float | None]:
        """The logarithm of the relative distance of the losses, by step; None where there is none to draw."""
        distances = [self.figures.loss.relative[a.step] for a, _ in self.common]
        return [math.log10(far) if 0 < far < math.inf else None for far in distances]

    # ---- picture -----------------------------------------------------------------------------------------------------

    def scene(self) -> Scene | None:
        """Both losses by step, their relative distance below, and where they part."""
        common = self.common
        curves = [drawable([one.loss for one in side]) for side in zip(*common, strict=True)]
        known = [loss for losses in curves for loss in losses if loss is not None]
        if len(common) < 2 or not known:
            return None
        scene = sheet("Two runs", self.verdict, 700.0, "two runs: their losses by step, and the distance of these")
        ends = common[0][0].step, common[-1][0].step
        low, high = min(known), max(known)
        margin = 0.06 * ((high - low) or 1.0)
        left, wide = 110.0, WIDTH - 110 - MARGIN
        upper = Plot(scene, left, TOP + 26, wide, 250, (ends[0], low - margin), (ends[1], high + margin))
        upper.axis_x("")
        upper.axis_y("loss, nats per token")
        steps = [a.step for a, _ in common]
        for losses, line, thick in zip(curves, (BLUE, ORANGE), (4.0, 1.8), strict=True):
            _curve(upper, steps, losses, line, thick)
        legend(scene, 660.0, [(f"{side}: {path}", line) for side, path, line in self._named_lines()], left)
        digits = self._digits()
        drawn = [value for value in digits if value is not None]
        if drawn:
            bottom, top = math.floor(min(drawn)), math.ceil(max(drawn) + 1e-9)
            lower = Plot(scene, left, TOP + 320, wide, 160, (ends[0], bottom), (ends[1], max(top, bottom + 1)))
            lower.axis_x("step")
            lower.axis_y("relative distance", lambda power: f"1e{power:.0f}", min(5, max(1, top - bottom)))
            _curve(lower, steps, digits, INK, 2.0)
        else:
            scene.shapes.append(Words(left, TOP + 400, "the losses are the same to the bit", LABEL, fill=GREY))
        if self.first is not None and self.first.parted is not None and ends[0] <= self.first.parted.step <= ends[1]:
            step = self.first.parted.step
            late = step - ends[0] > (ends[1] - ends[0]) / 2
            upper.limit_x(step, f"step {step}: {self.first.name}", "end" if late else "start")
        return scene

    def _named_lines(self) -> Iterator[tuple[str, Path, str]]:
        yield from zip(_SIDES, self.directories, (BLUE, ORANGE), strict=True)


def _curve(plot: Plot, steps: list[int], values: list[float | None], stroke: str, thick: float) -> None:
    """A curve with gaps where there is no value; a value between two gaps is a short line."""
    points: list[tuple[float, float]] = []
    for step, value in [*zip(steps, values, strict=True), (steps[-1], None)]:
        if value is not None:
            points.append((plot.x(step), plot.y(value)))
            continue
        if len(points) == 1:
            points.append((points[0][0] + 2, points[0][1]))
        if points:
            plot.scene.shapes.append(Curve(tuple(points), stroke, thick))
        points = []


def _parameters_table(figures: list[ComparedFigure]) -> Table:
    """The parameters that part in the first step in which any does."""
    step = figures[0].order[0]
    rows = []
    for figure in (one for one in figures if one.order[0] == step):
        assert figure.parted is not None
        rows.append([figure.name, f"{figure.parted.distance:.3g}", _size(figure.parted)])
    more = f"{plural(len(rows) - _MAX_ROWS, 'more parameter')} part in this step." if len(rows) > _MAX_ROWS else ""
    where = f"after step {step}" if step else "before the first step"
    return Table(
        ["~parameter", ">distance", ">of its norm"],
        rows[:_MAX_ROWS],
        title=f"Parameters that part {where}",
        caption=f"Distances are estimates, from sketches of the parameters. {more}".strip(),
    )


def _size(difference: Difference) -> str:
    return "no number" if math.isinf(difference.relative) else f"{difference.relative:.1e}"


def _value_text(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _figure_dict(figure: ComparedFigure) -> dict[str, Any]:
    found = {"first": figure.first, "parted": figure.parted, "largest": figure.largest}
    return {"kind": figure.kind, "name": figure.name} | {
        name: one and {"step": one.step, "relative": _finite(one.relative), "distance": _finite(one.distance)}
        for name, one in found.items()
    }


# ---- reading --------------------------------------------------------------------------------------------------------


def compare_runs(first: str | Path, second: str | Path) -> RunsResult:
    """Where two runs part: the `first` and the `second`, by their directories.

    >>> small = ["data.seq=16", "train.batch=2", "train.steps=2", "train.digest=true"]
    >>> runs = [ff.train(None, [*small, f"run.name={name}"]) for name in ("one", "two")]
    >>> ff.compare_runs("runs/one", "runs/two").ok
    True
    """
    directories = _directory(first), _directory(second)
    if os.path.samefile(*directories):
        raise UserError(
            f"{directories[0]} and {directories[1]} are one directory; a run is compared with another, such as the "
            "same job trained once more with --fresh",
            "compare.same",
        )
    try:
        return _compared(directories)
    except OSError as error:
        raise UserError(f"{error.filename or directories[0]} cannot be read: {error.strerror}", "file.read") from None


def _directory(run: str | Path) -> Path:
    place = place_of(run)
    if isinstance(place, RemotePlace):
        raise UserError(
            f"{place} has checkpoints alone: metrics are in the run's directory, which is what to name", "compare.place"
        )
    if (place / METRICS_FILE).is_file():
        return place
    near = Path(RunConfig().dir) / place
    there = f"; did you mean {near}?" if (near / METRICS_FILE).is_file() else ""
    raise UserError(f"{place} is not the directory of a run: it has no {METRICS_FILE}{there}", "run.missing")


def _compared(directories: tuple[Path, Path]) -> RunsResult:
    both = told(directories[0]), told(directories[1])
    settings = differing(*both)
    bits = bits_expected(*both, settings)
    notes = [note for one in both for note in one.notes]
    figures = ComparedFigures(dtype_of_both(*both), bits=bits)
    steps = tuple(_steps(directory, side, notes) for directory, side in zip(directories, _SIDES, strict=True))
    result = RunsResult(directories, (steps[0], steps[1]), figures, settings, bits, notes)
    if not result.common:
        spans = " and ".join(
            f"{directory} has {f'steps {own[0].step} to {own[-1].step}' if own else 'no step yet'}"
            for directory, own in zip(directories, steps, strict=True)
        )
        raise UserError(f"{spans}: no step is in both", "compare.steps")
    for a, b in result.common:
        figures.see_step(a, b)
    _see_digests(directories, figures, notes)
    return result


def _steps(directory: Path, side: str, notes: list[str]) -> list[Step]:
    """The steps of a run, one record each; notes what its metrics say beside them."""
    records = [record for _, record in read(directory / METRICS_FILE)]
    if damaged := records.count(None):
        notes.append(f"{side}: {plural(damaged, 'line')} of its metrics, damaged or half written, left out")
    notes += [f"{side}: {record}" for record in records if isinstance(record, StepDecision)]
    steps = {record.step: record for record in records if isinstance(record, Step)}
    return [steps[step] for step in sorted(steps)]


def _see_digests(directories: tuple[Path, Path], figures: ComparedFigures, notes: list[str]) -> None:
    """Reads both files side by side: a long run's do not fit into memory."""
    without = [side for side, place in zip(_SIDES, directories, strict=True) if not (place / DIGESTS_FILE).is_file()]
    if without:
        have = "have" if len(without) > 1 else "has"
        notes.append(
            f"{' and '.join(without)} {have} no {DIGESTS_FILE}, which train.digest=true writes: parameters are not "
            "compared"
        )
        return
    left, right = (_digests(directory) for directory in directories)
    first, second = next(left, None), next(right, None)
    names: set[str] = set()
    while first is not None and second is not None:
        if first.step == second.step:
            names |= first.parameters.keys() ^ second.parameters.keys()
            figures.see_digests(first, second)
        # A step that comes again, after a rollback whose lines stayed, is compared with what stands beside it.
        behind, ahead = first.step <= second.step, second.step <= first.step
        first, second = next(left, None) if behind else first, next(right, None) if ahead else second
    if not figures.digested:
        notes.append("No step has digests in both: parameters are not compared")
    if alone := sorted(name for name in names if " " not in name):  # copies for computing follow from the layout
        notes.append(f"Only one of the two has {first_of_many(alone)}")


def _digests(directory: Path) -> Iterator[Digests]:
    records: Iterator[Record | None] = (record for _, record in read(directory / DIGESTS_FILE, sys.maxsize))  # streamed
    return (record for record in records if isinstance(record, Digests))
