"""What a run has left in its directory: every step's figures, and how well it does on held-out data."""

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
from fivefold.support.text import bytes_text, counted
from fivefold.trainer.outputs import chart, drawable
from fivefold.trainer.records import METRICS, Evaluation, Load, Step, StepDecision, evenness, recent
from fivefold.trainer.resuming import stored_job

_HEIGHT = 560.0  # of the picture


def _left_out(size: int) -> str:
    return f"{METRICS} has {bytes_text(size)} more before these steps, which were not read"


@dataclass(frozen=True)
class TrainResult(Result):
    directory: Path  # has the job, the metrics and the checkpoints
    steps: list[Step]
    evaluation: Evaluation | None = None  # the last
    damaged: int = 0  # lines of the metrics that are not what was written, and are left out
    decisions: list[StepDecision] = field(default_factory=list)  # about steps that were spikes or no numbers
    left_out: int = 0  # bytes of the metrics before these steps

    @classmethod
    def read(cls, directory: Path) -> "TrainResult":
        records, left = recent(directory / METRICS)
        looks = [record for record in records if isinstance(record, Evaluation)]
        steps = [record for record in records if isinstance(record, Step)]
        decisions = [record for record in records if isinstance(record, StepDecision)]
        return cls(directory, steps, looks[-1] if looks else None, records.count(None), decisions, left)

    @property
    def losses(self) -> list[float]:
        """Of the steps that have one."""
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
        last = self.steps[-1:]
        yield Table(
            [">step", ">loss", ">gradient norm", ">tokens/s"],
            [
                [str(step.step), _loss(step), f"{step.grad_norm:.3f}", f"{step.tokens_per_second:,.0f}"]
                for step in [*(self.steps[:1] if len(self.steps) > 1 else []), *last]
            ],
        )
        if self.evaluation is not None:
            yield Text(f"held-out loss {self.evaluation.held_out_loss:.4f} nats per token", "bold")
        for decision in self.decisions:
            yield Text(str(decision))
        if self.damaged:
            yield Text(f"{counted(self.damaged, 'line')} of the metrics are damaged and left out")
        if self.left_out:
            yield Text(_left_out(self.left_out))
        yield Text(f"job, metrics and checkpoints are in {self.directory}")

    def scene(self) -> Scene | None:
        """The loss by step, and how well the run does on held-out data."""
        losses = drawable([step.loss for step in self.steps])
        known = [loss for loss in losses if loss is not None]
        if len(known) < 2:
            return None
        first, last = self.steps[0].step, self.steps[-1].step
        scene = sheet("Loss by step", f"{self.directory}: {last:,} steps, loss {known[-1]:.4f} at the end", _HEIGHT)
        low, high = min(known), max(known)
        room = 0.06 * ((high - low) or 1.0)
        place = (110, TOP + 6, WIDTH - 110 - MARGIN, _HEIGHT - TOP - 70)
        plot = Plot(scene, *place, (first, low - room), (last, high + room))
        plot.axis_x("step")
        plot.axis_y("loss, nats per token")
        points = zip((step.step for step in self.steps), losses, strict=True)
        for there, part in groupby(points, lambda point: point[1] is not None):
            if there:  # where there is no loss, the curve has a gap
                drawn = tuple((plot.x(step), plot.y(loss)) for step, loss in part if loss is not None)
                scene.shapes.append(Curve(drawn, BLUE, 2.0))
        return scene


def _loss(step: Step) -> str:
    return "none" if step.loss is None else f"{step.loss:.4f}"


# ---- experts --------------------------------------------------------------------------------------------------------
# The load of a run's experts over its steps: a table for people, a picture of every layer and expert, JSON.


PICTURE = "load.svg"
_BARS = "·▁▂▃▄▅▆▇█"  # of none, and of up to twice the mean
_BAR = 32  # experts that have one of their own in the table
_COLUMNS, _ROWS = 80, 320  # cells of the picture, at most
_LEFT, _GAP = 132.0, 4.0
_WIDE = WIDTH - _LEFT - MARGIN
_COLD, _EVEN, _HOT = (33, 102, 172), (247, 247, 247), (178, 24, 43)  # a quarter of the mean, the mean, four times it
_SHADES = 8  # on either side

Tokens = list[list[int]]  # by layer and expert


@dataclass(frozen=True)
class ExpertsResult(Result):
    directory: Path
    model: ModelSpec
    steps: list[Step]  # those whose record has the tokens of every expert
    dropped: int  # of all steps
    most_uneven: Step  # the step with the fullest expert of all
    left_out: int = 0  # bytes of the metrics before these steps

    @classmethod
    def read(cls, directory: Path, model: ModelSpec) -> "ExpertsResult":
        if model.experts is None:
            raise UserError(f"{model.name}, which {directory} trains, has no experts")
        records, left = recent(directory / METRICS)
        loaded = [record for record in records if isinstance(record, Step) and record.load is not None]
        shape = [model.experts.count] * len(model.routed_layers)
        complete = [step for step in loaded if [len(layer) for layer in _tokens(step)] == shape]
        if not complete:
            damaged = counted(records.count(None), "line")
            why = f"; {damaged} of its metrics.jsonl cannot be read" if None in records else " yet"
            raise UserError(f"{directory} has no step with a load{why}")
        most_uneven = max(loaded, key=lambda step: _load(step).fullest)
        return cls(directory, model, complete, sum(_load(step).dropped for step in loaded), most_uneven, left)

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
        for layer, then, now in zip(self.layers, _tokens(first), _tokens(last), strict=True):
            full = max(range(len(now)), key=now.__getitem__)
            rows.append(
                [
                    str(layer),
                    _times(max(_shares(then))),
                    _times(_shares(now)[full]),
                    str(full),
                    _times(min(_shares(now))),
                    f"{evenness(now):.3f}",
                    _bars(now),
                ]
            )
        then_and_now = (f">fullest at step {step.step}" for step in (first, last))
        yield Table(
            [">layer", *then_and_now, ">which expert", ">emptiest", ">entropy", "by expert"],
            rows,
            caption="Loads are times the mean of their layer, bars up to 2; the entropy is 1 where all are alike.",
        )
        load = _load(self.most_uneven)
        yield Text(
            f"The fullest expert of all steps had {_times(load.fullest)} the mean of its layer, in step "
            f"{self.most_uneven.step}; {counted(self.dropped, 'token')} dropped."
        )
        if self.left_out:
            yield Text(_left_out(self.left_out))

    # ---- the picture -------------------------------------------------------------------------------------------------

    def scene(self) -> Scene:
        """A band for each layer and in it a line for each expert, over the steps: blue below the mean, red above."""
        columns, experts = self._columns(), self.model.experts
        assert experts is not None
        lines = min(len(columns[0][0]), max(1, _ROWS // len(self.layers)))
        high = max(1.5, min(14.0, 440 / (lines * len(self.layers))))
        first, last = self.steps[0].step, self.steps[-1].step
        asked = f"{self.model.name}: {experts.count} experts a layer, {experts.top_k} a token; steps {first} to {last}"
        scene = sheet("Load of the experts", asked, 0.0, "load of experts by step")
        each = lines * high + _GAP
        named = max(1, -(-18 // round(each)))  # every so many layers, so that names do not touch
        for at, layer in enumerate(self.layers):
            top = TOP + at * each
            if at % named == 0:
                scene.shapes.append(Words(_LEFT - 10, top + each / 2, f"layer {layer}", SMALL, "end", GREY))
            grid = [_thinned(_shares(column[at]), lines) for column in columns]
            for line in range(lines):
                scene.shapes += _band([_colour(shares[line]) for shares in grid], top + line * high, high)
        bottom = TOP + len(self.layers) * each
        _axis(scene, bottom, self.steps)
        _scale(scene, bottom + 74)
        scene.height = bottom + 100
        return scene

    def _columns(self) -> list[Tokens]:
        """The steps, or neighbours of them added up where there are more than fit."""
        many = min(_COLUMNS, len(self.steps))
        cuts = [len(self.steps) * at // many for at in range(many + 1)]
        groups = (self.steps[start:stop] for start, stop in pairwise(cuts))
        return [[[sum(of) for of in zip(*layers, strict=True)] for layers in zip(*map(_tokens, group), strict=True)]
                for group in groups]  # fmt: skip


def experts(run: str | Path) -> ExpertsResult:
    """The load of the experts of a `run`, by its directory.

    >>> result = ff.experts("runs/moe")  # doctest: +SKIP
    """
    directory = path_of(str(run))
    if not (directory / METRICS).is_file():
        raise UserError(f"{directory} is not the directory of a run: it has no metrics.jsonl")
    try:
        return ExpertsResult.read(directory, stored_job(directory).model)
    except OSError as error:
        raise UserError(f"{error.filename or directory} cannot be read: {error.strerror}") from None


def _load(step: Step) -> Load:
    assert step.load is not None
    return step.load


def _tokens(step: Step) -> Tokens:
    return _load(step).tokens or []


def _shares(layer: list[int]) -> list[float]:
    """Of each expert, in times the mean."""
    mean = max(1, sum(layer)) / len(layer)
    return [tokens / mean for tokens in layer]


def _times(share: float) -> str:
    return f"{share:.2f}x"


def _bars(layer: list[int]) -> str:
    return "".join(_BARS[min(8, math.ceil(4 * share))] for share in _thinned(_shares(layer), min(_BAR, len(layer))))


def _thinned(shares: list[float], count: int) -> list[float]:
    """So many, each the fullest of the neighbours that it stands for."""
    cuts = [len(shares) * at // count for at in range(count + 1)]
    return [max(shares[start:stop]) for start, stop in pairwise(cuts)]


def _colour(share: float) -> str:
    """By the logarithm, in as many shades as can be told apart."""
    away = max(-1.0, min(1.0, math.log2(share) / 2)) if share else -1.0
    return _shade(round(away * _SHADES))


def _shade(number: int) -> str:
    end, part = _HOT if number > 0 else _COLD, abs(number) / _SHADES
    mixed = (round(a + (b - a) * part) for a, b in zip(_EVEN, end, strict=True))
    return f"#{''.join(f'{channel:02x}' for channel in mixed)}"


def _band(colours: list[str], top: float, high: float) -> Iterator[Rect]:
    """A line of cells; neighbours of one colour are one."""
    wide, start = _WIDE / len(colours), 0
    for at in range(1, len(colours) + 1):
        if at == len(colours) or colours[at] != colours[start]:
            yield Rect(_LEFT + start * wide, top, (at - start) * wide, high, colours[start])
            start = at


def _axis(scene: Scene, y: float, steps: list[Step]) -> None:
    """Steps below the bands: those of some columns."""
    count = min(9, len(steps))
    for part in range(count):
        step = steps[round(part * (len(steps) - 1) / max(1, count - 1))]
        x = _LEFT + _WIDE * (part / max(1, count - 1))
        scene.shapes.append(Words(x, y + 16, str(step.step), SMALL, "middle", GREY))
    scene.shapes.append(Words(_LEFT + _WIDE / 2, y + 40, "step", LABEL, "middle"))


def _scale(scene: Scene, y: float) -> None:
    """In the middle below: a quarter of the mean, the mean, four times it."""
    wide = 20.0
    left = _LEFT + _WIDE / 2 - (2 * _SHADES + 1) * wide / 2
    right = left + (2 * _SHADES + 1) * wide
    shades = range(-_SHADES, _SHADES + 1)
    scene.shapes += [Rect(left + at * wide, y - 8, wide, 16, _shade(number)) for at, number in enumerate(shades)]
    scene.shapes += [
        Words(left - 10, y, "tokens of an expert: 1/4 of the layer's mean or less", LABEL, "end"),
        Words((left + right) / 2, y, "the mean", SMALL, "middle", ON_LIGHT),
        Words(right + 10, y, "4 times it or more", LABEL),
    ]
