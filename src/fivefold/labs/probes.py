"""What an answer computes on the way, rank by rank, next to one process: outputs, of which gradients say little.

A check keeps them with `student.probe`; here, in the parent, they are compared and the difference is named.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.foreign.adapter import Layout, layout_text
from fivefold.foreign.evidence import factor_name
from fivefold.labs.groups import groups_of

Values = NDArray[np.float64]
_FITS = 1e-9
# Bits of a number's fraction, and the largest error of a rounding.
_DTYPES = (("bfloat16", 7, 2.0**-8), ("float16", 10, 2.0**-11), ("float32", 23, 2.0**-24))
SMALL = 64 * 2.0**-24  # what some operations in float32 make
_COARSE = 2.0 * 2.0**-8  # and in bfloat16
ROUNDED = (
    "an error this small comes from rounding to float32, and not from a wrong formula; compute in float64, without a "
    "cast on the way"
)
ALONE = "one process"


def file_of(folder: Path, layout: str, rank: int, name: str) -> Path:
    return folder / f"{layout}-{rank}-{name}.npy"


def differences(folder: Path, layout: Layout, world: int, probes: Mapping[str, int | None]) -> list[str]:
    """How the first probe that differs does, in a sentence; nothing if none does. `probes`: by name, in the order in
    which they are computed, the dimension along which ranks have parts, or None where each has the whole."""
    for name, dim in probes.items():
        files = [file_of(folder, layout_text(layout), rank, name) for rank in range(world)]
        truth_file = file_of(folder, ALONE, 0, name)
        if not truth_file.exists() or not all(file.exists() for file in files):
            continue
        try:
            truth, *ranks = (np.load(file, allow_pickle=False) for file in (truth_file, *files))
        except (EOFError, ValueError):  # a rank was ended while it wrote
            continue
        for group in groups_of(layout, world):
            parts = {rank: ranks[rank] for rank in group}
            if text := _shape(truth, parts, dim) or _difference(truth, _joined(parts, dim), layout):
                return [f"{name} {text}"]
    return []


def _joined(ranks: Mapping[int, Values], dim: int | None) -> dict[int, Values]:
    """By rank; what is in parts is that of the first."""
    return {**ranks} if dim is None else {min(ranks): np.concatenate([*ranks.values()], axis=dim)}


def _shape(truth: Values, by_rank: Mapping[int, Values], dim: int | None) -> str:
    ranks = [*by_rank.values()]
    if dim is None:
        odd = [rank for rank, own in by_rank.items() if own.shape != truth.shape]
        return f"has the shape {by_rank[odd[0]].shape} on rank {odd[0]}; it should be {truth.shape}" if odd else ""
    if all(own.shape == truth.shape for own in ranks):
        return f"is whole on every rank, {truth.shape}: each is to have its part of dimension {dim}"
    shapes = " and ".join(dict.fromkeys(str(own.shape) for own in ranks))
    wanted = f"is to be {truth.shape} when its parts are joined in dimension {dim}, and these are {shapes}"
    try:
        return "" if np.concatenate(ranks, axis=dim).shape == truth.shape else wanted
    except ValueError:
        return wanted


def _close(values: Values, truth: Values) -> bool:
    scale = float(np.abs(truth).max(initial=0.0)) or 1.0
    return values.shape == truth.shape and bool(np.abs(values - truth).max(initial=0.0) <= _FITS * scale)


def _difference(truth: Values, by_rank: Mapping[int, Values], layout: Layout) -> str:
    ranks = [*by_rank.values()]
    wrong = [rank for rank, own in by_rank.items() if not _close(own, truth)]
    if not wrong:
        return ""
    where = "" if len(wrong) == len(ranks) else f" on rank {wrong[0]}"
    own = by_rank[wrong[0]]
    if not np.isfinite(own).all():
        return f"has {int((~np.isfinite(own)).sum()):,} elements that are nan or infinite{where}"
    if truth.ndim > 1 and _close(_centred(own), _centred(truth)):
        return f"is off by the same row for every token{where}: by a bias"
    for view in (np.asarray, _centred)[: truth.ndim]:  # a bias may be added before or after what went wrong
        if text := _scaled(view(truth), [view(values) for values in ranks], view(own), layout):
            return text + where
    if truth.ndim > 1 and _columns(own) == _columns(truth):
        return f"has the right features in another order{where}"
    if truth.ndim > 1 and _tokens(own) == _tokens(truth):
        return f"has the right tokens in another order{where}"
    error = np.abs(own - truth) / (float(np.abs(truth).max(initial=0.0)) or 1.0)
    places = np.argwhere(error > _FITS)
    first = ", ".join(map(str, places[0]))
    which = f"in {len(places):,} of {truth.size:,} elements, first at [{first}]"
    if narrower := _narrower(own, float(error.max())):
        return f"is off by {error.max():.1e} of its largest element{where}, {which}: {narrower}"
    size = f"{error.max():.2g} of its largest element"
    coarse = " (rounding to bfloat16 makes as much)" if error.max() <= _COARSE and len(places) > truth.size / 2 else ""
    return f"differs{where} {which}, by up to {size}{coarse}"


def _narrower(own: Values, error: float) -> str:
    """Whether a difference is what rounding to a narrower dtype makes, and no mistake of the formula."""
    for name, bits, rounding in _DTYPES:
        cut = np.ascontiguousarray(own).view(np.int64) & ((1 << (52 - bits)) - 1)
        if own.size and not cut.any() and error <= 64 * rounding:  # each value is one of that dtype
            return f"these are numbers of {name}; compute in float64, without a cast on the way"
    if error <= SMALL:
        return ROUNDED
    return ""


def _scaled(truth: Values, ranks: Sequence[Values], own: Values, layout: Layout) -> str:
    """Numbers that were multiplied, and sums that were left out."""
    factor = float((own * truth).sum() / ((truth * truth).sum() or 1.0))
    if abs(factor) > _FITS and _close(own, factor * truth):
        name = factor_name(float(f"{factor:.8g}"), layout, {}, len(ranks))
        return f"is {factor:.6g} x{f' = {name} x' if name else ''} what it should be"
    total = np.sum(ranks, axis=0)
    if len(ranks) > 1 and _close(total, truth):
        return "is in parts on the ranks, which add up to the truth, and nobody adds them"
    if len(ranks) > 1 and _close(total / len(ranks), truth):
        return "is the truth in the mean over the ranks, and nobody takes it"
    return ""


def _centred(values: Values) -> Values:
    """Without what is the same for every token: a bias."""
    rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    return np.asarray(rows - rows[:1])


def _tokens(values: Values) -> list[tuple[float, ...]]:
    """The rows of all sequences, without their order."""
    return sorted(map(tuple, values.reshape(-1, values.shape[-1]).round(9).tolist()))


def _columns(values: Values) -> list[tuple[float, ...]]:
    """The features of all tokens, without their biases and their order."""
    return sorted(tuple(column) for column in _centred(values).T.round(9).tolist())
