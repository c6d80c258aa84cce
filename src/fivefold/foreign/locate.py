"""Where a difference begins: which module gives another result from the same input, forward or backward, and which
calls of dropout draw unlike masks.

A token is found among those of one process by two projections of its vector, so it does not matter which rank has it,
in which order. What a rank holds in parts (a slice of each vector, a summand) has no counterpart, and is left out.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fivefold.foreign.compare import at_numbers
from fivefold.foreign.evidence import REPORTS, Cause, Evidence
from fivefold.foreign.gradient_causes import sum_of
from fivefold.foreign.measurement import Call, Insight, Observation, Values

_CLOSE = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.1}
_ALMOST_ALL = 0.999  # of tokens that must be found: two may happen to be as good as equal


def located(evidence: Evidence) -> list[Cause]:
    """Where the forward pass, or else the backward pass, first differs; nothing if it cannot be told."""
    insight, traces = evidence.insight, evidence.traces
    if insight is None or not traces:
        return []
    return [*_before_reduction(evidence), *_in_modules(evidence, insight, traces)]


def _before_reduction(evidence: Evidence) -> list[Cause]:
    """Whether what ranks themselves add to the gradients that differ adds up to the truth."""
    size = len(evidence.truth)
    own = [at_numbers(rank.numbers, trace.unreduced, size) for rank in evidence.ranks
           if (trace := evidence.traces.get(rank.rank)) is not None and trace.unreduced]  # fmt: skip
    if len(own) != len(evidence.ranks) or not evidence.failing:
        return []
    fits = [sum_of(evidence, identity, own, least=1) for identity in evidence.failing]
    if all(fit is not None for fit in fits):
        return [Cause("before they are reduced, the ranks' own parts are right: what reduces or scales them is wrong")]
    if all(fit is None for fit in fits):
        return [Cause("before they are reduced, the ranks' own parts are wrong: the loss or the backward pass is")]
    return []


def _in_modules(evidence: Evidence, insight: Insight, traces: Mapping[int, Observation]) -> list[Cause]:
    truth = _by_module(insight.trace.calls)
    close = _CLOSE[evidence.dtype]
    if any(d.quantity == "loss" and d.step == 1 and not d.passed for d in evidence.deviations):
        return _forward(traces, truth, close)
    return _backward(traces, truth, close)


class _Known:
    """All that one process saw of one module."""

    def __init__(self, calls: Sequence[Call]):
        self.outputs = np.concatenate([call.outputs for call in calls])
        self.inputs = np.concatenate([call.inputs for call in calls])
        self.gradients = np.concatenate([call.gradients for call in calls])
        self.width = calls[0].width


def _by_module(calls: Sequence[Call]) -> dict[str, _Known]:
    grouped: dict[str, list[Call]] = {}
    for call in calls:
        grouped.setdefault(call.module, []).append(call)
    return {name: _Known(own) for name, own in grouped.items()}


def _forward(traces: Mapping[int, Observation], truth: Mapping[str, _Known], close: float) -> list[Cause]:
    """Modules finish inner ones first, so the first that differs is the smallest that does."""
    order = {name: index for index, name in enumerate(truth)}
    first: tuple[int, str, int, bool] | None = None
    for rank, trace in traces.items():
        parts = _parts(trace, truth)
        for call in trace.calls:
            known = truth.get(call.module)
            if known is None or known.width != call.width or not len(call.outputs) or call.module in parts:
                continue
            if _share_found(call.outputs, known.outputs, close) < _ALMOST_ALL:
                same_input = not len(call.inputs) or _share_found(call.inputs, known.inputs, close) >= _ALMOST_ALL
                if first is None or order[call.module] < first[0]:
                    first = (order[call.module], call.module, rank, same_input)
                break
    if first is None:
        return []
    _, module, rank, same_input = first
    given = "what it is given is that of one process" if same_input else "as is already what it is given"
    return [Cause(f"forward: the output of {module} is the first that differs, on rank {rank}; {given}")]


def _parts(trace: Observation, truth: Mapping[str, _Known]) -> set[str]:
    """Modules that are smaller here than in one process, as what holds the layers is on a stage of a pipeline."""
    called = {call.module for call in trace.calls}
    missing = [name.split(".") for name in truth if name not in called]
    return {".".join(words[:count]) for words in missing for count in range(1, len(words))}


def _share_found(rows: Values, known: Values, close: float) -> float:
    """The share of rows that are among the known ones."""
    if not len(known) or not len(rows):
        return 1.0 if not len(rows) else 0.0
    scale = float(np.abs(known).max()) or 1.0
    order = known[np.argsort(known[:, 0])]
    at = np.searchsorted(order[:, 0], rows[:, 0])
    found = np.zeros(len(rows), dtype=bool)
    for offset in (-2, -1, 0, 1):
        near = order[np.clip(at + offset, 0, len(order) - 1)]
        found |= (np.abs(near - rows) <= close * scale).all(axis=1)
    return float(found.mean())


def _backward(traces: Mapping[int, Observation], truth: Mapping[str, _Known], close: float) -> list[Cause]:
    """The first module, from the end, whose output has a gradient that is none of one process, whatever its size; and
    where the size changes on the way."""
    causes: list[Cause] = []
    for rank, trace in traces.items():
        before: tuple[str, float] | None = None
        parts = _parts(trace, truth)
        for call in reversed(trace.calls):
            known = truth.get(call.module)
            if known is None or known.width != call.width or not len(call.gradients) or not len(known.gradients):
                continue
            if call.module in parts:
                continue
            factors = _factors(call.gradients, known.gradients, close)
            if factors is None and causes:
                return causes
            if factors is None:
                where = f"after {before[0]}, where it is right, " if before and abs(before[1] - 1) <= 1e-6 else ""
                return [Cause(
                    f"backward: {where}the gradient at the output of {call.module} is the first that is not that of "
                    f"one process, on rank {rank}"
                )]  # fmt: skip
            if not len(factors):
                continue
            low, high = float(factors.min()), float(factors.max())
            if high - low > 1e-6 * abs(high):
                continue  # samples of unlike weight
            if before is not None and abs(high / before[1] - 1) > 1e-6 and not causes:
                causes.append(Cause(
                    f"backward: between the outputs of {before[0]} and {call.module} the gradient becomes "
                    f"x {high / before[1]:.6g} of what it is in one process, on rank {rank}"
                ))  # fmt: skip
            before = (call.module, high)
        if causes:
            break
    return causes


def _factors(rows: Values, known: Values, close: float) -> Values | None:
    """By how much each row is longer than the known one of its direction; None if some have no such."""
    least = 1e-12
    rows = rows[np.abs(rows).min(axis=1) > least * (np.abs(rows).max() or 1.0)]
    known = known[np.abs(known).min(axis=1) > least * (np.abs(known).max() or 1.0)]
    if not len(rows):
        return np.zeros(0)
    if not len(known):
        return None
    directions = known[:, 0] / known[:, 1]
    order = np.argsort(directions)
    at = np.clip(np.searchsorted(directions[order], rows[:, 0] / rows[:, 1]), 1, len(order) - 1)
    own = rows[:, 0] / rows[:, 1]
    best = np.where(
        np.abs(directions[order[at]] - own) < np.abs(directions[order[at - 1]] - own), order[at], order[at - 1]
    )
    off = np.abs(directions[best] - own) / (1 + np.abs(own))
    if (off <= close).mean() < _ALMOST_ALL:
        return None
    result: Values = rows[:, 0] / known[best, 0]
    return result


# ---- dropout --------------------------------------------------------------------------------------------------------


def unlike_masks(traces: Mapping[int, Observation]) -> list[Cause]:
    """Ranks that hold the same activation in the same call of dropout, and leave other elements."""
    calls: dict[tuple[str, int, str], dict[str, list[int]]] = {}
    for rank, trace in traces.items():
        seen: dict[str, int] = {}
        for drop in trace.drops:
            number = seen[drop.place] = seen.get(drop.place, -1) + 1
            calls.setdefault((drop.place, number, drop.entered), {}).setdefault(drop.kept, []).append(rank)
    places: dict[str, list[int]] = {}
    for (place, _, _), masks in calls.items():
        if len(masks) > 1:
            places.setdefault(place, sorted({rank for ranks in masks.values() for rank in ranks}))
    if not places:
        return []
    ranks = sorted({rank for own in places.values() for rank in own})
    return [
        Cause(
            f"dropout at {', '.join(places)}: ranks {ranks} hold the same activation and draw different masks",
            "the random state of tensor parallel ranks differs where they hold the same values",
            REPORTS,
        )
    ]
