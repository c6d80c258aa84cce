"""Compares what ranks report with one process, element by element, on every rank and every replica.

The error of a tensor is max|a - b| / scale on the worst rank; b is one process, and the scale is max|b| over the whole
tensor. A gradient may be zero in theory (a bias before a softmax): what is below 1e-10 of the model's largest is
rounding noise, and is compared on the scale of the largest. After an optimizer that divides by a root of squares, such
a parameter has moved by noise of full size, so it is not compared.

In float64 an error may be 1e-10; correct layouts show about 1e-15. In a narrower dtype the bound is measured: one
process runs several times with every weight moved by one rounding, which draws all roundings anew, and a layout may be
off `SPREAD` times as far as any of those runs, or a few roundings of the result itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fivefold.foreign.measurement import Numbers, OneProcess, RankValues, Values

FLOAT64 = 1e-10
SPREAD = 4.0
_ZERO = 1e-10
_EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7}


class Deviation(NamedTuple):
    """The worst of one tensor (or number) in one step, over all ranks. Infinite where something is missing."""

    quantity: str  # loss | gradient | norm | parameter
    name: str  # of the parameter
    step: int  # from 1
    rank: int
    error: float
    tolerance: float
    note: str = ""
    ratio: float | None = None  # the rank's values are the truth times this, where they are
    elements: str = ""  # of the whole parameter, flat: the first and the last that this rank holds and are off

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        words = {"norm": "the gradient norm", "gradient": "the gradient of", "loss": "the loss"}
        subject = f"{words.get(self.quantity, self.quantity)} {self.name}".strip()
        what = self.note or f"is off by {self.error:.2g}, and {self.tolerance:.1g} is allowed"
        ratio = "" if self.ratio is None else f", x {self.ratio:.6g}"
        where = f", elements {self.elements}" if self.elements else ""
        return f"{subject} {what}{ratio} (step {self.step}, rank {self.rank}{where})"


class Held(NamedTuple):
    """What a rank has of one quantity."""

    rank: int
    numbers: Mapping[str, Numbers]
    values: Mapping[str, Values | None]


class Truth(NamedTuple):
    """The same in one process; by parameter what an error is relative to, and how large rounding noise is."""

    values: Values
    scale: Values
    noise: Values


class Tensors:
    """The parameters of one process, by the numbers of their elements, one parameter after the other."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.names = list(shapes)
        sizes = np.array([math.prod(shape) for shape in shapes.values()], dtype=np.int64)
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.size = int(sizes.sum())

    def ids(self, numbers: Numbers) -> Numbers:
        """Which parameter each element belongs to."""
        found: Numbers = np.searchsorted(self.starts, numbers, side="right") - 1
        return found

    def largest(self, whole: Values) -> Values:
        """By parameter, the largest absolute value."""
        parts = zip(self.starts, self.ends, strict=True)
        return np.array([np.abs(whole[begin:end]).max(initial=0.0) for begin, end in parts])


def compare(reference: OneProcess, ranks: Sequence[RankValues], dtype: str, updates: bool) -> list[Deviation]:
    """Everything that was measured against one process; the worst first."""
    deviations = list(_compare(reference, ranks, dtype, updates))
    return sorted(deviations, key=_excess, reverse=True)


def _excess(deviation: Deviation) -> float:
    if math.isnan(deviation.error):
        return math.inf
    return deviation.error / deviation.tolerance if deviation.tolerance else deviation.error


def _compare(reference: OneProcess, ranks: Sequence[RankValues], dtype: str, updates: bool) -> Iterator[Deviation]:
    tensors, exact = Tensors(reference.shapes), dtype == "float64"
    yield from _coverage(tensors, reference, ranks)
    floor = FLOAT64 if exact else 4 * _EPS[dtype]
    for step, expected in enumerate(reference.losses):
        yield from _scalars(
            "loss", step, [r.losses for r in ranks], expected, max(floor, SPREAD * reference.loss_noise)
        )
        truth = reference.gradients[step]
        noise = reference.noise[step] if reference.noise else np.zeros(len(tensors.names))
        held = [Held(r.rank, r.numbers, r.gradients[step]) for r in ranks]
        yield from _tensors(tensors, "gradient", step, held, Truth(truth, gradient_scale(tensors, truth), noise), floor)
        if step == len(reference.norms):  # nobody came as far as its update
            return
        if (norm := reference.norms[step]) is not None:
            limit = max(floor, SPREAD * reference.norm_noise)
            yield from _scalars("norm", step, [r.norms for r in ranks], norm, limit)
        if updates:
            after = reference.parameters[step]
            moved = tensors.largest(after - reference.weights)
            scale = np.maximum(tensors.largest(after), moved)
            scale[zero_in_theory(tensors, reference.gradients)] = np.inf
            noise = reference.parameter_noise[step] if reference.parameter_noise else np.zeros(len(tensors.names))
            held = [Held(r.rank, r.numbers, r.parameters[step]) for r in ranks]
            yield from _tensors(tensors, "parameter", step, held, Truth(after, scale, noise), floor)


def compare_replicas(reference: OneProcess, ranks: Sequence[RankValues], updates: bool) -> list[Deviation]:
    """For models that draw random numbers: whether ranks that hold the same elements have the same values, and whether
    every element is held by one."""
    tensors, size = Tensors(reference.shapes), len(reference.weights)
    deviations = list(_coverage(tensors, reference, ranks))
    count = len(ranks[0].losses)
    steps = [("gradient", step, [rank.gradients[step] for rank in ranks]) for step in range(count)]
    if updates:
        steps += [("parameter", step, [dict(rank.parameters[step]) for rank in ranks]) for step in range(count)]
    for quantity, step, values in steps:
        truth = np.full(size, np.nan)
        for rank, own in zip(ranks, values, strict=True):
            whole = at_numbers(rank.numbers, own, size)
            truth = np.where(np.isnan(truth), whole, truth)
        truth = np.nan_to_num(truth)
        held = [Held(rank.rank, rank.numbers, own) for rank, own in zip(ranks, values, strict=True)]
        first = Truth(truth, gradient_scale(tensors, truth), np.zeros(len(tensors.names)))
        deviations += _tensors(tensors, quantity, step, held, first, FLOAT64)
    unlike = "differs between ranks that hold the same elements"
    named = [found if found.passed or found.note else found._replace(note=unlike) for found in deviations]
    return sorted(named, key=_excess, reverse=True)


def at_numbers(numbers_by_name: Mapping[str, Numbers], values: Mapping[str, Values | None], size: int) -> Values:
    """Local values at their places in the whole; NaN where the rank holds nothing, zero where it has no gradient."""
    whole = np.full(size, np.nan)
    for name, numbers in numbers_by_name.items():
        value = values.get(name)
        if value is None or len(value) != len(numbers):
            value = np.zeros(len(numbers))
        whole[numbers[numbers >= 0]] = value[numbers >= 0]
    return whole


def gradient_scale(tensors: Tensors, truth: Values) -> Values:
    largest = tensors.largest(truth)
    most = largest.max(initial=0.0)
    return np.where(largest <= _ZERO * most, most, largest)


def zero_in_theory(tensors: Tensors, gradients: Sequence[Values]) -> Values:
    """Whether a parameter's gradient is nothing but rounding noise in some step."""
    zero = np.zeros(len(tensors.names), dtype=bool)
    for truth in gradients:
        largest = tensors.largest(truth)
        zero |= (largest <= _ZERO * largest.max(initial=0.0)) & (largest > 0)
    return zero


def _coverage(tensors: Tensors, reference: OneProcess, ranks: Sequence[RankValues]) -> Iterator[Deviation]:
    held = np.zeros(len(reference.weights), dtype=bool)
    for rank in ranks:
        for numbers in rank.numbers.values():
            held[numbers[numbers >= 0]] = True
    for identity in np.unique(tensors.ids(np.flatnonzero(~held))):
        missing = int((~held[tensors.starts[identity] : tensors.ends[identity]]).sum())
        size = int(tensors.ends[identity] - tensors.starts[identity])
        note = f"is held by no rank in {missing} of {size} elements"
        yield Deviation("parameter", tensors.names[identity], 0, 0, math.inf, 0.0, note)


def _scalars(
    quantity: str, step: int, by_rank: Sequence[Sequence[float | None]], expected: float, tolerance: float
) -> Iterator[Deviation]:
    """The worst rank; ranks that gave nothing are left out, but not all of them may be."""
    found = [(rank, value) for rank, values in enumerate(by_rank) if (value := values[step]) is not None]
    if not found:
        yield Deviation(quantity, "", step + 1, 0, math.inf, tolerance, "is given by no rank")
        return
    rank, value = max(found, key=lambda pair: -1.0 if pair[1] == expected else _distance(pair[1], expected))
    error = _distance(value, expected)
    note = f"is {value:.10g}, and {expected:.10g} in one process" if not error <= tolerance else ""
    yield Deviation(quantity, "", step + 1, rank, error, tolerance, note)


def _distance(value: float, expected: float) -> float:
    error = abs(value - expected) / (abs(expected) or 1.0)
    return math.inf if math.isnan(error) else error


def _tensors(
    tensors: Tensors, quantity: str, step: int, held: Sequence[Held], truth: Truth, floor: float
) -> Iterator[Deviation]:
    worst: dict[int, Deviation] = {}

    def note(
        identity: int, rank: int, error: float, text: str = "", own: tuple[Values, Values, Numbers] | None = None
    ) -> None:
        tolerance = max(floor, SPREAD * float(truth.noise[identity]) / float(truth.scale[identity] or 1.0))
        found = Deviation(quantity, tensors.names[identity], step + 1, rank, error, tolerance, text)
        if identity not in worst or _excess(found) > _excess(worst[identity]):
            first = int(tensors.starts[identity])
            worst[identity] = found if found.passed or own is None else _located(found, *own, first)

    for rank, numbers_by_name, values_by_name in held:
        for name, all_numbers in numbers_by_name.items():
            known = all_numbers >= 0
            numbers, values = all_numbers[known], values_by_name[name]
            ids = tensors.ids(numbers)
            for identity in map(int, np.unique(ids)):
                own, scale = ids == identity, float(truth.scale[identity])
                expected = truth.values[numbers[own]]
                if values is None:
                    if np.abs(expected).max(initial=0.0) > floor * scale:
                        note(identity, rank, math.inf, "is missing")
                elif len(values) != len(known):
                    note(identity, rank, math.inf, f"has {len(values)} elements, and the parameter {len(known)}")
                else:
                    here = values[known][own]
                    distance = float(np.abs(here - expected).max(initial=0.0))
                    error = distance / scale if scale else distance
                    text = "is not a number" if math.isnan(error) else ""
                    note(identity, rank, error, text, (here, expected, numbers[own]))
    yield from worst.values()


def _located(found: Deviation, values: Values, expected: Values, numbers: Numbers, start: int) -> Deviation:
    """Which elements of the parameter are off, and by which ratio, if it is one."""
    largest = float(np.abs(expected).max(initial=0.0))
    off = ~(np.abs(values - expected) <= found.tolerance * largest)
    places = numbers[off] - start
    elements = f"{int(places.min())} to {int(places.max())}" if len(places) else ""
    ratio, square = None, float(expected @ expected)
    if square and not found.note and found.quantity == "gradient":
        ratio = float(values @ expected) / square
        fits = np.abs(values - ratio * expected).max() <= max(1e-8, found.tolerance) * largest * max(1.0, abs(ratio))
        ratio = float(f"{ratio:.8g}") if fits else None
    return found._replace(ratio=ratio, elements=elements)
