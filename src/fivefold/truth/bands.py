"""Ranges out of residuals, so that a case of a source that nobody has seen lies inside with a given probability.

Sources are drawn, and rows are drawn within them (a hierarchical conformal prediction: Dunn, Wasserman and Ramdas,
arXiv 1809.07441; Lee, Barber and Willett, arXiv 2306.06342). So every source has the same weight, however many rows it
has, and a new source may lie beyond all that are known: of K + 1 sources it is one.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from msgspec import structs

from fivefold.plan.interval import SHARE, Band, Traits

PRIOR = 12  # sources: a trait's factor is drawn to 1 as by so many that have none; with fewer, less is held
HALF = 0.5  # slow and fast errors have widths of their own, drawn halfway to each other


class Residual(NamedTuple):
    """One row of a source: the logarithm of measured over predicted."""

    source: str
    error: float
    traits: Traits


def band_of(residuals: Sequence[Residual], share: float = SHARE) -> Band:
    """The narrowest of its form that holds `share` of the cases of a new source."""
    sources = by_source(residuals)
    factors = _factors(residuals)
    flat = Band(-1.0, 1.0, len(sources), len(residuals), factors=factors)
    slow = _mean(residuals, lambda one: max(0.0, one.error))
    fast = _mean(residuals, lambda one: max(0.0, -one.error))
    whole = slow + fast
    if not whole:
        return structs.replace(flat, low=0.0, high=0.0)
    up, down = (HALF + (1 - HALF) * 2 * side / whole for side in (slow, fast))

    def size(one: Residual) -> float:
        return max(one.error / up, -one.error / down) / flat.scale(one.traits)

    sizes = [(size(one), 1 / len(sources[one.source])) for one in residuals]
    reach = quantile(sizes, share * (len(sources) + 1) / len(sources))
    return structs.replace(flat, low=-down * reach, high=up * reach)


def _factors(residuals: Sequence[Residual]) -> dict[str, dict[str, float]]:
    """By trait: how much larger the errors of a level are than all are, by sources that have it."""
    usual = _mean(residuals, lambda one: abs(one.error)) or 1.0
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for one in residuals for name in one.traits):
        for level in sorted({one.traits[name] for one in residuals if name in one.traits}):
            mine = by_source([one for one in residuals if one.traits.get(name) == level])
            means = [fmean(abs(one.error) for one in rows) for rows in mine.values()]
            factor = (sum(means) + PRIOR * usual) / ((len(means) + PRIOR) * usual)
            found.setdefault(name, {})[level] = factor
    return found


def by_source(residuals: Sequence[Residual]) -> dict[str, list[Residual]]:
    found: dict[str, list[Residual]] = {}
    for one in residuals:
        found.setdefault(one.source, []).append(one)
    return found


def _mean(residuals: Sequence[Residual], of: Callable[[Residual], float]) -> float:
    """Over sources, of the mean over their rows."""
    return fmean(fmean(map(of, rows)) for rows in by_source(residuals).values())


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """The least value that has `share` of the weight at or below it; the largest, where there is none."""
    total, below = math.fsum(weight for _, weight in weighted), 0.0
    for value, weight in sorted(weighted):
        below += weight / total
        if below >= share - 1e-9:
            return value
    return max(value for value, _ in weighted)


class Covered(NamedTuple):
    """A source, against the range that the others give."""

    source: str
    rows: int
    error: float  # mean absolute
    inside: float  # share of its rows
    below: float  # the range: faster, or smaller
    above: float


def covered(source: str, rows: Sequence[Residual], band: Band) -> Covered:
    outside = [one.error for one in rows if not band.holds(one.error, one.traits)]
    above = sum(error > 0 for error in outside)
    error = fmean(abs(math.expm1(-one.error)) for one in rows)  # of the prediction, as everywhere
    shares = (count / len(rows) for count in (len(rows) - len(outside), len(outside) - above, above))
    return Covered(source, len(rows), error, *shares)


def coverage_of(residuals: Sequence[Residual]) -> list[Covered]:
    """Every source against the band of the others."""
    sources = by_source(residuals)
    if len(sources) < 2:
        return []
    return [
        covered(name, rows, band_of([one for one in residuals if one.source != name])) for name, rows in sources.items()
    ]
