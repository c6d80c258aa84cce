"""Pipeline stages: the layers of each; the first also has the embedding, the last the norm and the head.

stages_of(spec, layout, seq)      # one Stage each; their layers add up to the model's, in order
schedule_of(spec, layout, seq)    # the schedule that runs them
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from fivefold.layout.layout import Layout
from fivefold.schedules.costs import Costs
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.registry import build
from fivefold.schedules.schedule import Schedule
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import EMBEDDING_UNIT, HEAD_UNIT, Parameter, block, head

BISECTION_STEPS = 64  # of an interval: bisection to the last bit


@dataclass(frozen=True)
class Stage:
    index: int
    layers: range  # global indices: layer 17 is layer 17 on any rank
    first: bool  # has the embedding, and positions
    last: bool  # has the norm and the head

    def holds(self, parameter: Parameter) -> bool:
        if parameter.unit == EMBEDDING_UNIT:
            return self.first or (self.last and parameter.tied)
        return self.last if parameter.unit == HEAD_UNIT else parameter.unit in self.layers

    def names(self, spec: ModelSpec) -> list[str]:
        """The names of its parameters, in the model's order."""
        return [parameter.name for parameter in spec.parameters() if self.holds(parameter)]


@lru_cache(maxsize=1024)  # the planner asks for each of its layouts
def stages_of(spec: ModelSpec, layout: Layout, seq: int) -> tuple[Stage, ...]:
    """The stages of a layout: as its `split` says, or balanced."""
    sizes = layout.split or balance_layers(spec, layout.stages, seq)
    ends = [0, *accumulate(sizes)]
    layers = [range(*pair) for pair in pairwise(ends)]
    return tuple(Stage(n, own, first=n == 0, last=n == len(sizes) - 1) for n, own in enumerate(layers))


@lru_cache(maxsize=4096)
def balance_layers(spec: ModelSpec, stages: int, seq: int) -> tuple[int, ...]:
    """Layers of each stage such that the slowest stage is as fast as can be; then, that the others are as even.

    Where all layers cost the same, trying every size of the first stage, dividing the rest evenly and trying the sizes
    of the last one around that finds the best: of a stage that is larger than another by two layers, one can be moved.
    """
    if stages == 1:
        return (spec.layers,)
    layer, bottom, top = costs(spec, seq)
    if any(layer_cost(spec, number, seq) != layer for number in range(spec.layers)):
        return _partition(spec, stages, seq)
    best: tuple[tuple[float, float], int, int] | None = None
    inner = stages - 2
    for first in range((spec.layers + inner) // (inner + 1) + 1):
        even = int((spec.layers - first - inner * top / layer) / (inner + 1))
        near = range(max(0, even - 2), min(spec.layers - first, max(0, even) + 2) + 1)
        for last in near if inner else [spec.layers - first]:
            rest = spec.layers - first - last
            each, more = divmod(rest, inner) if inner else (0, 0)
            ends = (first * layer + bottom, last * layer + top)
            small, large = each * layer, (each + 1) * layer
            squares = ends[0] ** 2 + ends[1] ** 2 + (inner - more) * small**2 + more * large**2
            score = (max(*ends, large if more else small if inner else 0.0), squares)
            if best is None or score < best[0]:
                best = score, first, last
    assert best is not None
    _, first, last = best
    each, more = divmod(spec.layers - first - last, stages - 2) if stages > 2 else (0, 0)
    # Later stages hold fewer microbatches: the larger ones.
    return (first, *[each] * (stages - 2 - more), *[each + 1] * more, last)


def _partition(spec: ModelSpec, stages: int, seq: int) -> tuple[int, ...]:
    """The same for layers that differ: how fast the slowest stage can be, and then the best split of the last layers
    over the last stages, for more and more of them."""
    _, bottom, top = costs(spec, seq)
    before = [0.0, *accumulate(layer_cost(spec, layer, seq) for layer in range(spec.layers))]
    ends = [bottom, *[0.0] * (stages - 2), top]

    def furthest(most: float) -> list[int]:
        """Where each stage ends, at the latest, if none takes longer than that."""
        stops = [0]
        for own in ends:
            stops.append(bisect_right(before, before[stops[-1]] + most - own) - 1)
        return stops

    least, most = max(ends), before[-1] + max(ends)
    for _ in range(BISECTION_STEPS):
        middle = (least + most) / 2
        least, most = (least, middle) if furthest(middle)[-1] == spec.layers else (middle, most)
    most *= 1 + 1e-12
    late, early = furthest(most), [spec.layers]
    for own in reversed(ends):
        early.insert(0, bisect_left(before, before[early[0]] - most + own))
    # By the layer that a stage starts with: the least sum of squares from there on, and where the stage then ends.
    after, chosen = {spec.layers: (0.0, 0)}, []
    for stage in reversed(range(stages)):
        row = {}
        for start in range(early[stage], late[stage] + 1):
            best = (float("inf"), 0)
            for end in range(max(start, early[stage + 1]), late[stage + 1] + 1):
                own = before[end] - before[start] + ends[stage]
                if own > most:
                    break
                best = min(best, (own**2 + after[end][0], end))
            row[start] = best
        after = row
        chosen.append(row)
    split = [0]
    for row in reversed(chosen):
        split.append(row[split[-1]][1])
    return tuple(end - start for start, end in pairwise(split))


def schedule_of(spec: ModelSpec, layout: Layout, seq: int, microbatches: int = 0) -> Schedule:
    """The schedule of a layout, one object for the planner and the trainer. `microbatches`: fewer than the layout's, in
    the same groups.

    `auto` is made for the stages that the model has in it, unequal as they are.
    """
    record, m = layout.record, microbatches or layout.microbatches
    stages = stages_of(spec, layout, seq) if record.uses_stage_times and layout.pp > 1 else ()
    group = record.period(layout.pp, layout.microbatches) if record.group else None
    return _built(record, layout.pp, m, layout.chunks, group, (spec, seq, stages) if stages else None)


@lru_cache(maxsize=512)
def _built(
    record: ScheduleInfo,
    p: int,
    m: int,
    chunks: int,
    group: int | None,
    weighed: tuple[ModelSpec, int, tuple[Stage, ...]] | None,
) -> Schedule:
    return build(record, p, m, chunks=chunks, group=group, costs=_durations(*weighed, p) if weighed else None)


def _durations(spec: ModelSpec, seq: int, stages: tuple[Stage, ...], p: int) -> Costs:
    """By stage, in units of the longest forward: FLOPs, of which scores have no weights and twice the input's."""
    _, bottom, top = costs(spec, seq)
    layers = [sum(layer_cost(spec, layer, seq) for layer in stage.layers) for stage in stages]
    seen = [sum(block(spec, layer=spec.kinds(layer)).rest(seq / 2) for layer in stage.layers) for stage in stages]
    ends = [bottom * stage.first + top * stage.last for stage in stages]
    f = [layer + end for layer, end in zip(layers, ends, strict=True)]
    i = [layer + score + end for layer, score, end in zip(layers, seen, ends, strict=True)]
    w = [layer - score + top * stage.last for layer, score, stage in zip(layers, seen, stages, strict=True)]
    b = [x + y for x, y in zip(i, w, strict=True)]
    held = [sum(activation_weight(spec, layer) for layer in stage.layers) for stage in stages]
    shares = tuple(own / max(1, sum(held)) * p for own in held)
    unit = max(f)
    forward, inputs, weights, backward = (tuple(time / unit for time in times) for times in (f, i, w, b))
    return Costs(forward, inputs, weights, backward, activation=shares)


def costs(spec: ModelSpec, seq: int) -> tuple[float, float, float]:
    """Forward FLOPs of a token in the last layer, in the embedding (an addition a feature) and in the head."""
    return layer_cost(spec, spec.layers - 1, seq), float(spec.hidden), 2.0 * head(spec).size


def activation_weight(spec: ModelSpec, layer: int) -> int:
    """Features that a layer's matmuls and attention read and write for a token: by these the layers of a model share
    out its activations."""
    own = block(spec, layer=spec.kinds(layer))
    matmuls = ((matmul.inputs + matmul.outputs) * max(1, matmul.chosen) for matmul in own.matmuls)
    return sum(matmuls) + own.attention.seen


def layer_cost(spec: ModelSpec, layer: int, seq: int) -> float:
    """Forward FLOPs of a token in one layer."""
    own = block(spec, layer=spec.kinds(layer))
    return float(2 * own.active + own.rest(seq / 2))
