"""The likely causes of a difference: in the gradients if they differ, else in the norm or the update."""

import math
from collections.abc import Sequence

import numpy as np

from fivefold.foreign.compare import Deviation, at_numbers
from fivefold.foreign.evidence import CLIPPING, DDP, OPTIMIZERS, SHOWN, Cause, Evidence, factor_name, ranks_text
from fivefold.foreign.gradient_causes import gradient_causes

_UNREDUCED = "step() returns it unreduced"
_CLIPS = "gradients are right; clipping by it is not"
_SQUARES = ". Sums of squares are added over ranks that have the whole sum already, or hold the same"
_ABOUT = 0.02  # an optimizer that steps twice moves by about twice as much


def causes(evidence: Evidence) -> list[Cause]:
    found: list[Cause] = []
    if evidence.failing:
        found += gradient_causes(evidence)
    found += _loss_causes(evidence)
    if not evidence.failing:
        found += _norm_causes(evidence)
        found += _update_causes(evidence)
    if not found and all(d.step > 1 for d in evidence.deviations if not d.passed):
        later = "the first step is right in all, and the next is not: look at the state that a step leaves"
        found.append(Cause(later, "gradients that are not cleared, or the optimizer's state", OPTIMIZERS))
    return found


def _loss_causes(evidence: Evidence) -> list[Cause]:
    bad = [d for d in evidence.deviations if d.quantity == "loss" and d.step == 1 and not d.passed]
    losses = [loss for rank in evidence.ranks if (loss := rank.losses[0]) is not None]
    if not bad or not losses:
        return []
    truth = evidence.reference.losses[0]
    factors = {float(f"{loss / truth:.8g}") for loss in losses} if truth else set()
    if len(factors) == 1 and (name := factor_name(min(factors), evidence.layout, evidence.known, len(evidence.ranks))):
        text = f"the loss is x {min(factors):.6g} = {name} on every rank that has one"
        return [Cause(text, "step() returns it summed or averaged over ranks once too often", DDP)]
    if len(set(losses)) > 1 and math.isclose(sum(losses) / len(losses), truth, rel_tol=1e-9):
        return [Cause("the loss is each rank's own: their mean is that of one process", _UNREDUCED, DDP)]
    if len(set(losses)) > 1 and math.isclose(sum(losses), truth, rel_tol=1e-9):
        return [Cause("the loss is each rank's share: their sum is that of one process", _UNREDUCED, DDP)]
    return []


def _norm_causes(evidence: Evidence) -> list[Cause]:
    bad = [d for d in evidence.deviations if d.quantity == "norm" and d.step == 1 and not d.passed]
    if not bad:
        return []
    found = evidence.ranks[bad[0].rank].norms[0]
    truth = evidence.truth
    copies = np.sum([~np.isnan(whole) for whole in evidence.held], axis=0)
    squares = truth**2
    guesses = {
        "every copy of a replicated parameter is counted": squares @ copies,
        "copies are counted where a parameter has more of them than others": squares @ (copies / copies.min()),
    }
    for rank, whole in enumerate(evidence.held):
        guesses[f"it is the norm of what rank {rank} holds, and not summed over ranks"] = squares[
            ~np.isnan(whole)
        ].sum()
    for identity, name in enumerate(evidence.tensors.names):
        own = squares[evidence.part(identity)].sum()
        guesses[f"{name} is left out"] = squares.sum() - own
        guesses[f"{name} is counted twice"] = squares.sum() + own
    for text, square in guesses.items():
        if found is not None and math.isclose(found**2, float(square), rel_tol=1e-9):
            return [Cause(f"the gradient norm is {found:.8g}: {text}", _CLIPS, CLIPPING)]
    factor = (found or 0.0) / (evidence.reference.norms[0] or math.inf)
    name = factor_name(factor, evidence.layout, evidence.known, len(evidence.ranks))
    square = "" if name else factor_name(factor**2, evidence.layout, evidence.known, len(evidence.ranks))
    name = name or " or ".join(f"the square root of {one}" for one in square.split(" or ") if one)
    text = f"the gradient norm is x {factor:.8g}{f' = {name}' if name else ''}, and the gradients are right"
    return [Cause(text, f"{_CLIPS}{_SQUARES if square else ''}", CLIPPING)]


def _update_causes(evidence: Evidence) -> list[Cause]:
    """Of the first step: what comes after it follows from that."""
    wrong = [d for d in evidence.deviations if d.step == 1 and not d.passed]
    bad = [d for d in wrong if d.quantity == "parameter" and d.name in evidence.tensors.names]
    if not bad or any(d.quantity in ("gradient", "norm") for d in wrong):
        return []
    names = [d.name for d in bad]
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    factors, where = _moved(evidence, bad), ""
    parts = [evidence.part(evidence.tensors.names.index(name)) for name in names]
    holders = ~np.isnan([np.concatenate([whole[part] for part in parts]) for whole in evidence.held])
    if 0 < len(factors) < holders.any(axis=1).sum():
        where = f" on {ranks_text([*factors])}, and right on the others"
        where += ", so that replicas disagree after the update" if (holders.sum(axis=0) > 1).any() else ""
    told = [factor for own in factors.values() for factor, _ in own] or [math.nan]
    if math.isclose(min(told), max(told), rel_tol=_ABOUT, abs_tol=1e-6):
        exact = all(exact for own in factors.values() for _, exact in own)
        by = f"x {told[0]:.6g}" if exact else f"about x {float(np.mean(told)):.2g}"
        what = "are not updated" if abs(told[0]) < 1e-9 else f"move {by} as far as they should"
        likely = "the optimizer's step, or what it is given"
        return [Cause(f"gradients are right, and parameters {what}{where}: {shown}", likely, OPTIMIZERS)]
    likely = "the optimizer's state, its groups (weight decay, learning rate), or shards that are not gathered"
    text = f"gradients and norm are right, and parameters after the update are not{where}: {shown}"
    return [Cause(text, likely, OPTIMIZERS)]


def _moved(evidence: Evidence, bad: Sequence[Deviation]) -> dict[int, list[tuple[float, bool]]]:
    """By rank that has one wrong: of each parameter, how far it moves of how far it should, NaN if it is no factor; and
    whether that is exact."""
    reference, size = evidence.reference, len(evidence.truth)
    right = reference.parameters[0]
    found: dict[int, list[tuple[float, bool]]] = {}
    for rank in evidence.ranks:
        after = at_numbers(rank.numbers, rank.parameters[0], size)
        for deviation in bad:
            part = evidence.part(evidence.tensors.names.index(deviation.name))
            here = ~np.isnan(after[part])
            own, expected = ((values[part] - reference.weights[part])[here] for values in (after, right))
            if not np.abs(own - expected).max(initial=0.0) > deviation.tolerance * np.abs(right[part]).max():
                continue
            largest, square = float(np.abs(expected).max()), float(expected @ expected)
            factor = float(own @ expected) / square if square else math.nan
            off = float(np.abs(own - factor * expected).max())
            fits = off <= (_ABOUT * abs(factor) + 1e-6) * largest
            found.setdefault(rank.rank, []).append((factor if fits else math.nan, off <= 1e-6 * largest))
    return found
