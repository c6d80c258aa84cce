"""Where a difference begins: which module gives another result from the same input, forward or backward.

A token is found among those of one process by two projections of its vector, so it does not matter which rank has it,
in which order. What a rank holds in parts (a slice of each vector, a summand) has no counterpart, and is left out.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fivefold.foreign.compare import at_numbers
from fivefold.foreign.evidence import (
    AUTOGRAD,
    DDP,
    MODULES,
    Cause,
    Evidence,
    ModuleRow,
    all_of,
    factor_name,
    listed,
    ranks_text,
)
from fivefold.foreign.gradient_causes import sum_of
from fivefold.foreign.measurement import Call, Insight, Numbers, Observation, Values

_CLOSE = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.1}
_NO_BACKWARD_SUM = "a column-parallel layer whose backward pass does not all-reduce the gradient of its input"
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
    fits = {identity: sum_of(evidence, identity, own, least=1) for identity in evidence.failing}
    right = [identity for identity, fit in fits.items() if fit is not None]
    wrong = [identity for identity, fit in fits.items() if fit is None]
    factors = {factor for fit in fits.values() if fit is not None for factor in [fit[1]]}
    if right and not wrong:
        text = "before they are reduced, the ranks' own parts are right: what reduces or scales them is wrong"
        if len(factors) == 1 and abs((factor := factors.pop()) - 1) > 1e-6:
            name = factor_name(factor, evidence.layout, evidence.known, len(evidence.ranks))
            text += f" (they add up to x {factor:.6g}{f' = {name}' if name else ''})"
        return [Cause(text, "", DDP)]
    if wrong and not right:
        text = "before they are reduced, the ranks' own parts are wrong: the loss or the backward pass is"
        return [Cause(text, "", AUTOGRAD)]
    text = f"before they are reduced, the ranks' own parts are wrong in {all_of(evidence, wrong)} "
    return [Cause(f"{text}({evidence.names(wrong)}), and right in the others that differ", "", AUTOGRAD)]


def _in_modules(evidence: Evidence, insight: Insight, traces: Mapping[int, Observation]) -> list[Cause]:
    truth = _by_module(insight.trace.calls)
    calls, close = in_order(traces, truth), _CLOSE[evidence.dtype]
    if any(d.quantity == "loss" and d.step == 1 and not d.passed for d in evidence.deviations):
        return [*_forward(calls, truth, close), *_other_buffers(traces, insight.trace)]
    return _backward(calls, truth, close)


def in_order(traces: Mapping[int, Observation], truth: Mapping[str, "_Known"]) -> dict[int, list[Call]]:
    """Calls of modules as one process first calls them: a backward pass that computes layers again begins with the
    last. Calls of one module, as of several microbatches, stay one after the other."""
    place = {name: index for index, name in enumerate(truth)}
    return {rank: sorted(trace.calls, key=lambda call: (place.get(call.module, len(place)), call.part))
            for rank, trace in traces.items()}  # fmt: skip


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


def _forward(traces: Mapping[int, Sequence[Call]], truth: Mapping[str, _Known], close: float) -> list[Cause]:
    """Modules finish inner ones first, so the first that differs is the smallest that does."""
    order = {name: index for index, name in enumerate(truth)}
    first: tuple[int, Call, int, bool] | None = None
    for rank, calls in traces.items():
        for call in _comparable(calls, truth):
            known = truth[call.module]
            if len(call.outputs) and _share_found(call.outputs, known.outputs, close) < _ALMOST_ALL:
                same_input = not len(call.inputs) or _share_found(call.inputs, known.inputs, close) >= _ALMOST_ALL
                if first is None or order[call.module] < first[0]:
                    first = (order[call.module], call, rank, same_input)
                break
    if first is None:
        return []
    _, call, rank, same_input = first
    given = "what it is given is that of one process" if same_input else "as is already what it is given"
    text = f"forward: the output of {call.module} is the first that differs, on rank {rank}"
    return [Cause(f"{text}{_which_call(call, traces[rank])}; {given}", "", MODULES)]


def _other_buffers(traces: Mapping[int, Observation], truth: Observation) -> list[Cause]:
    """Buffers as large as in one process, and with other values, that no step changes."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, known in truth.buffers.items():
        ranks = [rank for rank, trace in traces.items() if (own := trace.buffers.get(name)) is not None
                 and own.shape == known.shape and own.digest != known.digest]  # fmt: skip
        if ranks:
            by_ranks.setdefault(tuple(ranks), []).append(name)
    return [
        Cause(
            f"buffers with other values than in one process, on {ranks_text(ranks)}: {listed(names)}",
            "what build() puts into them is not the same in all layouts; load() gives parameters alone",
            MODULES,
        )
        for ranks, names in by_ranks.items()
    ]


def _comparable(calls: Sequence[Call], truth: Mapping[str, _Known]) -> list[Call]:
    """Calls of modules that one process has, too, and as large."""
    parts = _parts(calls, truth)
    return [call for call in calls if (known := truth.get(call.module)) is not None
            and known.width == call.width and call.module not in parts]  # fmt: skip


def _which_call(call: Call, calls: Sequence[Call]) -> str:
    """Its microbatch, if the module is called more than once."""
    count = sum(other.module == call.module for other in calls)
    return f" in its call {call.part + 1} of {count}" if count > 1 else ""


def _parts(calls: Sequence[Call], truth: Mapping[str, _Known]) -> set[str]:
    """Modules that are smaller here than in one process, as what holds the layers is on a stage of a pipeline."""
    called = {call.module for call in calls}
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


def _backward(traces: Mapping[int, Sequence[Call]], truth: Mapping[str, _Known], close: float) -> list[Cause]:
    """The first module, from the end, whose output has a gradient that is none of one process, whatever its size; and
    where the size changes on the way."""
    causes: list[Cause] = []
    for rank, calls in traces.items():
        before: tuple[str, float] | None = None
        for call in reversed(_comparable(calls, truth)):
            known = truth[call.module]
            if not len(call.gradients) or not len(known.gradients):
                continue
            factors = _factors(call.gradients, known.gradients, close)
            if factors is None and causes:
                return causes
            if factors is None and before and (ranks := _summed(traces, rank, call, before, truth, close)):
                where = f"{_entered(call, calls)}{_which_call(call, calls)}"
                text = f"backward: {where} the gradients of ranks {ranks} add up to that of one process: a missing SUM"
                return [Cause(text, _NO_BACKWARD_SUM, MODULES)]
            if factors is None:
                where = f"after {before[0]}, where it is right, " if before and abs(before[1] - 1) <= 1e-6 else ""
                text = f"backward: {where}the gradient at the output of {call.module} is the first that is not that of "
                return [Cause(f"{text}one process, on rank {rank}{_which_call(call, calls)}", "", AUTOGRAD)]
            if not len(factors):
                continue
            low, high = float(factors.min()), float(factors.max())
            if high - low > 1e-6 * abs(high):
                continue  # samples of unlike weight
            if before is not None and abs(high / before[1] - 1) > 1e-6 and not causes:
                text = f"backward: between the outputs of {before[0]} and {call.module} the gradient becomes "
                text += f"x {high / before[1]:.6g} of what it is in one process, on rank {rank}"
                causes.append(Cause(f"{text}{_which_call(call, calls)}", "", AUTOGRAD))
            before = (call.module, high)
        if causes:
            break
    return causes


def _summed(
    traces: Mapping[int, Sequence[Call]],
    rank: int,
    call: Call,
    before: tuple[str, float],
    truth: Mapping[str, _Known],
    close: float,
) -> list[int]:
    """The ranks that have these activations, if their gradients add up to those of one process; else none.

    What follows may be added to its own input, as a residual is: then each rank has the gradient of that whole, which
    `before` has at its output, and only the rest is a summand."""
    own = {other: match for other, calls in traces.items() for match in calls
           if (match.module, match.part) == (call.module, call.part)
           and match.outputs.shape == match.gradients.shape == call.outputs.shape
           and np.abs(match.outputs - call.outputs).max() <= close * np.abs(call.outputs).max()}  # fmt: skip
    known, after = truth[call.module], truth[before[0]]
    if len(own) < 2 or known.outputs.shape != known.gradients.shape:
        return []
    at = _places(call.outputs, known.outputs, close)
    rows, at = np.flatnonzero(at >= 0), at[at >= 0]
    if len(rows) < 2:
        return []
    total = np.sum([match.gradients[rows] for match in own.values()], axis=0)
    expected = [known.gradients[at]]
    if after.width == known.width and after.gradients.shape == known.gradients.shape:
        expected.append(expected[0] + (len(own) - 1) * after.gradients[at])
    scale = np.abs(total).max() or 1.0
    fits = any(np.abs(total - before[1] * one).max() <= close * scale for one in expected)
    return sorted(own) if fits else []


def _places(rows: Values, known: Values, close: float) -> Numbers:
    """Which of the known each row is; -1 where none is, or more than one may be."""
    near = close * (float(np.abs(known).max(initial=0.0)) or 1.0)
    order = np.argsort(known[:, 0])
    low = np.searchsorted(known[order, 0], rows[:, 0] - near)
    high = np.searchsorted(known[order, 0], rows[:, 0] + near, side="right")
    at = order[np.minimum(low, len(known) - 1)]
    one = (high - low == 1) & (np.abs(known[at] - rows).max(axis=1) <= near)
    found: Numbers = np.where(one, at, -1)
    return found


def _entered(call: Call, calls: Sequence[Call]) -> str:
    """The module that is given what a call gives, the innermost if there are more: inner ones finish first."""
    place = next(index for index, other in enumerate(calls) if other is call)
    for other in calls[place + 1 :]:
        if other.part == call.part and np.array_equal(other.inputs, call.outputs):
            return f"at the input of {other.module}"
    return f"at the output of {call.module}"


def module_rows(evidence: Evidence) -> list[ModuleRow]:
    """Every module that can be compared: whether its output, and its output's gradient, are those of one process, on
    the first rank where they are not."""
    if evidence.insight is None:
        return []
    truth, close = _by_module(evidence.insight.trace.calls), _CLOSE[evidence.dtype]
    rows: dict[str, ModuleRow] = {}
    for rank, calls in in_order(evidence.traces, truth).items():
        for call in _comparable(calls, truth):
            known = truth[call.module]
            forward = "same" if _share_found(call.outputs, known.outputs, close) >= _ALMOST_ALL else "differs"
            row = ModuleRow(call.module, rank, forward, _size(call, known, close))
            if call.module not in rows or _badness(row) > _badness(rows[call.module]):
                rows[call.module] = row
    return [rows[name] for name in truth if name in rows]


def _size(call: Call, known: _Known, close: float) -> str:
    """What the gradient of a call's output is to that of one process."""
    if not len(call.gradients) or not len(known.gradients):
        return "-"
    factors = _factors(call.gradients, known.gradients, close)
    if factors is None:
        return "differs"
    if not len(factors):
        return "-"
    low, high = float(factors.min()), float(factors.max())
    if high - low > 1e-6 * abs(high):
        return f"x {low:.4g} to {high:.4g}"
    return "same" if abs(high - 1) <= 1e-6 else f"x {high:.6g}"


def _badness(row: ModuleRow) -> int:
    return 2 * (row.forward == "differs") + (row.backward not in ("same", "-"))


def _factors(rows: Values, known: Values, close: float) -> Values | None:
    """By how much each row is longer than the known one of its direction; None if some have no such."""
    least = 1e-12
    if not np.isfinite(rows).all():
        return None
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
