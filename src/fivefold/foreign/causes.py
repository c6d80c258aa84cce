"""The likely causes of a difference: in the gradients if they differ, else in the norm or the update."""

import math

import numpy as np

from fivefold.foreign.compare import at_numbers
from fivefold.foreign.evidence import CLIPPING, DDP, OPTIMIZERS, SHOWN, Cause, Evidence, factor_name
from fivefold.foreign.gradient_causes import gradient_causes

_UNREDUCED = "step() returns it unreduced"
_CLIPS = "gradients are right; clipping by it is not"


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
    text = f"the gradient norm is x {factor:.8g}{f' = {name}' if name else ''}, and the gradients are right"
    return [Cause(text, _CLIPS, CLIPPING)]


def _update_causes(evidence: Evidence) -> list[Cause]:
    """Of the first step: what comes after it follows from that."""
    wrong = [d for d in evidence.deviations if d.step == 1 and not d.passed]
    bad = [d for d in wrong if d.quantity == "parameter"]
    if not bad or any(d.quantity in ("gradient", "norm") for d in wrong):
        return []
    names = [d.name for d in bad]
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    reference, size = evidence.reference, len(evidence.truth)
    moved = reference.parameters[0] - reference.weights
    factors = set()
    for rank in evidence.ranks:
        after = at_numbers(rank.numbers, rank.parameters[0], size)
        for identity in (evidence.tensors.names.index(name) for name in names):
            part = evidence.part(identity)
            here = ~np.isnan(after[part])
            own, expected = (after[part] - reference.weights[part])[here], moved[part][here]
            if not len(own) or not expected @ expected:
                continue
            factor = float(own @ expected / (expected @ expected))
            fit = evidence.close(own, factor * expected, float(np.abs(expected).max()) * 1e3)
            factors.add(float(f"{factor:.6g}") if fit else math.nan)
    if len(factors) == 1 and not math.isnan(factor := factors.pop()):
        what = "are not updated" if abs(factor) < 1e-9 else f"move x {factor:.6g}"
        return [
            Cause(
                f"gradients are right, and parameters {what}: {shown}",
                "the optimizer's step, or what it is given",
                OPTIMIZERS,
            )
        ]
    likely = "the optimizer's state, its groups (weight decay, learning rate), or shards that are not gathered"
    return [
        Cause(f"gradients and norm are right, and parameters after the update are not: {shown}", likely, OPTIMIZERS)
    ]
