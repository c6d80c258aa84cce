"""The results that a run's directory has: the record of every step, the held-out loss, and the load of experts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec

from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.render.chart import TOP, Plot, sheet
from fivefold.render.scene import BLUE, GREY, LABEL, MARGIN, ON_LIGHT, SMALL, WIDTH, Curve, Rect, Scene
from fivefold.render.scene import TextMark as Words
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.parsing import path_of
from fivefold.support.text import bytes_text, plural
from fivefold.trainer.outputs import chart, drawable
from fivefold.trainer.records import METRICS_FILE, Evaluation, Load, Step, StepDecision, evenness, read_recent
from fivefold.trainer.resuming import job_of_run

_PICTURE_HEIGHT = 560.0  # of the picture


def _left_out_text(size: int) -> str:
    return f"{METRICS_FILE} has {bytes_text(size)} more before these steps, which were not read"


@dataclass(frozen=True)
class TrainResult(Result):
    directory: Path  # has the job, the metrics and the checkpoints
    steps: list[Step]
    evaluation: Evaluation | None = None  # the last
    damaged: int = 0  # damaged lines of the metrics, which are left out
    decisions: list[StepDecision] = field(default_factory=list)  # about steps that were spikes or not finite
    left_out: int = 0  # bytes of the metrics before these steps, which were not read

    @classmethod
    def read(cls, directory: Path) -> "TrainResult":
        records, left_out = read_recent(directory / METRICS_FILE)
        evaluations = [record for record in records if isinstance(record, Evaluation)]
        steps = [record for record in records if isinstance(record, Step)]
        decisions = [record for record in records if isinstance(record, StepDecision)]
        evaluation = evaluations[-1] if evaluations else None
        return cls(directory, steps, evaluation, records.count(None), decisions, left_out)

    @property
    def losses(self) -> list[float]:
        """The losses of the steps that have one."""
        return [record.loss for record in self.steps if record.loss is not None]

    def to_dict(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "steps": msgspec.to_builtins(self.steps),
            "evaluation": msgspec.to_builtins(self.evaluation),
            "damaged": self.damaged,
            "decisions": msgspec.to_builtins(self.decisions),
            "left_out": self.left_out,
        }

    def blocks(self) -> Iterator[Block]:
        if len(self.losses) > 1:
            yield Text("\n".join(chart([step.loss for step in self.steps], {})))
        first_and_last = self.steps if len(self.steps) < 2 else [self.steps[0], self.steps[-1]]
        rows = [
            [str(step.step), _loss_text(step), f"{step.grad_norm:.3f}", f"{step.tokens_per_second:,.0f}"]
            for step in first_and_last
        ]
        yield Table([">step", ">loss", ">gradient norm", ">tokens/s"], rows)
        if self.evaluation is not None:
            yield Text(f"held-out loss {self.evaluation.held_out_loss:.4f} nats per token", "bold")
        for decision in self.decisions:
            yield Text(str(decision))
        if self.damaged:
            yield Text(f"{plural(self.damaged, 'line')} of the metrics are damaged and left out")
        if self.left_out:
            yield Text(_left_out_text(self.left_out))
        yield Text(f"job, metrics and checkpoints are in {self.directory}")

    def scene(self) -> Scene | None:
        """The loss by step as a curve."""
        losses = drawable([step.loss for step in self.steps])
        known = [loss for loss in losses if loss is not None]
        if len(known) < 2:
            return None
        first, last = self.steps[0].step, self.steps[-1].step
        scene = sheet(
            "Loss by step", f"{self.directory}: {last:,} steps, loss {known[-1]:.4f} at the end", _PICTURE_HEIGHT
        )
        low, high = min(known), max(known)
        margin = 0.06 * ((high - low) or 1.0)
        area = (110, TOP + 6, WIDTH - 110 - MARGIN, _PICTURE_HEIGHT - TOP - 70)  # left, top, width, height
        plot = Plot(scene, *area, (first, low - margin), (last, high + margin))
        plot.axis_x("step")
        plot.axis_y("loss, nats per token")
        points = zip((step.step for step in self.steps), losses, strict=True)
        for has_loss, group in groupby(points, lambda point: point[1] is not None):
            if has_loss:  # where there is no loss, the curve has a gap
                line = tuple((plot.x(step), plot.y(loss)) for step, loss in group if loss is not None)
                scene.shapes.append(Curve(line, BLUE, 2.0))
        return scene


def _loss_text(step: Step) -> str:
    return "none" if step.loss is None else f"{step.loss:.4f}"


# ---- experts --------------------------------------------------------------------------------------------------------
# The load of a run's experts over its steps: a table for people, a picture of every layer and expert, JSON.


LOAD_PICTURE = "load.svg"
_BARS = "·▁▂▃▄▅▆▇█"  # no tokens, and up to twice the mean
_MAX_BARS = 32  # in a row of the table; with more experts, a bar is the fullest of several
_MAX_COLUMNS, _MAX_ROWS = 80, 320  # cells of the picture
_LEFT, _GAP = 132.0, 4.0
_GRID_WIDTH = WIDTH - _LEFT - MARGIN
_COLD, _EVEN, _HOT = (33, 102, 172), (247, 247, 247), (178, 24, 43)  # a quarter of the mean, the mean, four times it
_SHADES = 8  # on either side of the mean

TokenCounts = list[list[int]]  # by layer and expert


@dataclass(frozen=True)
class ExpertsResult(Result):
    directory: Path
    model: ModelSpec
    steps: list[Step]  # those whose record has the tokens of every expert
    dropped: int  # tokens, of all steps
    most_uneven: Step  # the step with the fullest expert
    left_out: int = 0  # bytes of the metrics before these steps, which were not read

    @classmethod
    def read(cls, directory: Path, model: ModelSpec) -> "ExpertsResult":
        if model.experts is None:
            raise UserError(f"{model.name}, which {directory} trains, has no experts", "picture.empty")
        records, left_out = read_recent(directory / METRICS_FILE)
        with_load = [record for record in records if isinstance(record, Step) and record.load is not None]
        shape = [model.experts.count] * len(model.routed_layers)
        complete = [step for step in with_load if [len(layer) for layer in _tokens(step)] == shape]
        if not complete:
            damaged = plural(records.count(None), "line")
            why = f"; {damaged} of its metrics.jsonl cannot be read" if None in records else " yet"
            raise UserError(f"{directory} has no step with a load{why}", "picture.empty")
        most_uneven = max(with_load, key=lambda step: _load(step).fullest)
        dropped = sum(_load(step).dropped for step in with_load)
        return cls(directory, model, complete, dropped, most_uneven, left_out)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.model.routed_layers

    def to_dict(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "model": self.model.name,
            "experts": msgspec.to_builtins(self.model.experts),
            "layers": list(self.layers),
            "dropped": self.dropped,
            "left_out": self.left_out,
            "fullest": {"step": self.most_uneven.step, "times_the_mean": _load(self.most_uneven).fullest},
            "steps": [{"step": step.step} | msgspec.to_builtins(step.load) for step in self.steps],
        }

    def blocks(self) -> Iterator[Block]:
        first, last, experts = self.steps[0], self.steps[-1], self.model.experts
        assert experts is not None
        yield Text(
            f"{self.directory}  {self.model.name}: {experts.count} experts a layer, {experts.top_k} a token", "bold"
        )
        rows = []
        for layer, first_tokens, last_tokens in zip(self.layers, _tokens(first), _tokens(last), strict=True):
            fullest = max(range(len(last_tokens)), key=last_tokens.__getitem__)
            rows.append(
                [
                    str(layer),
                    _times(max(_relative_loads(first_tokens))),
                    _times(_relative_loads(last_tokens)[fullest]),
                    str(fullest),
                    _times(min(_relative_loads(last_tokens))),
                    f"{evenness(last_tokens):.3f}",
                    _bars(last_tokens),
                ]
            )
        fullest_heads = (f">fullest at step {step.step}" for step in (first, last))
        yield Table(
            [">layer", *fullest_heads, ">which expert", ">emptiest", ">entropy", "by expert"],
            rows,
            caption="Loads are times the mean of their layer, bars up to 2; the entropy is 1 where all are alike.",
        )
        load = _load(self.most_uneven)
        yield Text(
            f"The fullest expert of all steps had {_times(load.fullest)} the mean of its layer, in step "
            f"{self.most_uneven.step}; {plural(self.dropped, 'token')} dropped."
        )
        if self.left_out:
            yield Text(_left_out_text(self.left_out))

    # ---- the picture -------------------------------------------------------------------------------------------------

    def scene(self) -> Scene:
        """A band for each layer and in it a line for each expert, over the steps: blue below the mean, red above."""
        columns, experts = self._columns(), self.model.experts
        assert experts is not None
        lines = min(len(columns[0][0]), max(1, _MAX_ROWS // len(self.layers)))
        high = max(1.5, min(14.0, 440 / (lines * len(self.layers))))
        first, last = self.steps[0].step, self.steps[-1].step
        subtitle = f"{self.model.name}: {experts.count} experts a layer, {experts.top_k} a token"
        scene = sheet("Load of the experts", f"{subtitle}; steps {first} to {last}", 0.0, "load of experts by step")
        band_height = lines * high + _GAP
        label_every = max(1, -(-18 // round(band_height)))  # layers, so that labels do not touch
        for row, layer in enumerate(self.layers):
            top = TOP + row * band_height
            if row % label_every == 0:
                scene.shapes.append(Words(_LEFT - 10, top + band_height / 2, f"layer {layer}", SMALL, "end", GREY))
            grid = [_max_of_groups(_relative_loads(column[row]), lines) for column in columns]
            for line in range(lines):
                scene.shapes += _line([_colour(loads[line]) for loads in grid], top + line * high, high)
        bottom = TOP + len(self.layers) * band_height
        _axis(scene, bottom, self.steps)
        _scale(scene, bottom + 74)
        scene.height = bottom + 100
        return scene

    def _columns(self) -> list[TokenCounts]:
        """The tokens of each step, or the sums of neighbouring steps where there are more than fit."""
        count = min(_MAX_COLUMNS, len(self.steps))
        cuts = [len(self.steps) * number // count for number in range(count + 1)]
        groups = (self.steps[start:stop] for start, stop in pairwise(cuts))
        return [_sum_counts([_tokens(step) for step in group]) for group in groups]


def experts(run: str | Path) -> ExpertsResult:
    """The load of the experts of a `run`, by its directory.

    >>> run = ff.train(None, ["model=tiny-moe", "train.steps=2", "data.seq=32", "train.batch=2", "run.name=moe"])
    >>> len(ff.experts("runs/moe").steps)
    2
    """
    directory = path_of(str(run))
    if not (directory / METRICS_FILE).is_file():
        raise UserError(f"{directory} is not the directory of a run: it has no metrics.jsonl", "run.missing")
    try:
        return ExpertsResult.read(directory, job_of_run(directory).model)
    except OSError as error:
        raise UserError(f"{error.filename or directory} cannot be read: {error.strerror}", "file.read") from None


def _load(step: Step) -> Load:
    assert step.load is not None
    return step.load


def _tokens(step: Step) -> TokenCounts:
    return _load(step).tokens or []


def _sum_counts(steps: list[TokenCounts]) -> TokenCounts:
    return [[sum(expert) for expert in zip(*layer, strict=True)] for layer in zip(*steps, strict=True)]


def _relative_loads(layer: list[int]) -> list[float]:
    """The tokens of each expert, divided by the layer's mean."""
    mean = max(1, sum(layer)) / len(layer)
    return [tokens / mean for tokens in layer]


def _times(load: float) -> str:
    return f"{load:.2f}x"


def _bars(layer: list[int]) -> str:
    return "".join(
        _BARS[min(8, math.ceil(4 * load))]
        for load in _max_of_groups(_relative_loads(layer), min(_MAX_BARS, len(layer)))
    )


def _max_of_groups(loads: list[float], count: int) -> list[float]:
    """`count` values, each the largest of a group of neighbours."""
    cuts = [len(loads) * number // count for number in range(count + 1)]
    return [max(loads[start:stop]) for start, stop in pairwise(cuts)]


def _colour(load: float) -> str:
    """The colour of a load, by its logarithm: -1 is a quarter of the mean, 1 four times it."""
    position = max(-1.0, min(1.0, math.log2(load) / 2)) if load else -1.0
    return _shade(round(position * _SHADES))


def _shade(number: int) -> str:
    """The colour of one of the shades, from -_SHADES to _SHADES."""
    end, part = _HOT if number > 0 else _COLD, abs(number) / _SHADES
    mixed = (round(a + (b - a) * part) for a, b in zip(_EVEN, end, strict=True))
    return f"#{''.join(f'{channel:02x}' for channel in mixed)}"


def _line(colours: list[str], top: float, high: float) -> Iterator[Rect]:
    """A line of cells; neighbours of one colour are drawn as one."""
    wide, start = _GRID_WIDTH / len(colours), 0
    for stop in range(1, len(colours) + 1):
        if stop == len(colours) or colours[stop] != colours[start]:
            yield Rect(_LEFT + start * wide, top, (stop - start) * wide, high, colours[start])
            start = stop


def _axis(scene: Scene, y: float, steps: list[Step]) -> None:
    """The numbers of some steps, below the bands."""
    count = min(9, len(steps))
    for part in range(count):
        step = steps[round(part * (len(steps) - 1) / max(1, count - 1))]
        x = _LEFT + _GRID_WIDTH * (part / max(1, count - 1))
        scene.shapes.append(Words(x, y + 16, str(step.step), SMALL, "middle", GREY))
    scene.shapes.append(Words(_LEFT + _GRID_WIDTH / 2, y + 40, "step", LABEL, "middle"))


def _scale(scene: Scene, y: float) -> None:
    """The scale of colours, below the axis: a quarter of the mean, the mean, four times it."""
    wide = 20.0
    left = _LEFT + _GRID_WIDTH / 2 - (2 * _SHADES + 1) * wide / 2
    right = left + (2 * _SHADES + 1) * wide
    shades = range(-_SHADES, _SHADES + 1)
    scene.shapes += [
        Rect(left + column * wide, y - 8, wide, 16, _shade(number)) for column, number in enumerate(shades)
    ]
    scene.shapes += [
        Words(left - 10, y, "tokens of an expert: 1/4 of the layer's mean or less", LABEL, "end"),
        Words((left + right) / 2, y, "the mean", SMALL, "middle", ON_LIGHT),
        Words(right + 10, y, "4 times it or more", LABEL),
    ]
