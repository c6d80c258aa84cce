"""Ranges out of residuals: how many of a new source's rows they hold, whatever the sources are like."""

import random
from statistics import fmean

import pytest

from fivefold.accuracy.coverage import Residual, band_of, cover, coverage_of, quantile
from fivefold.planner.error_range import COVERAGE


def drawn(seed: int, sources: int, bias: float = 0.08, noise: float = 0.05, shift: float = 0.0) -> list[Residual]:
    """Sources with a bias of their own, and with very unlike numbers of rows."""
    chance, found = random.Random(seed), []
    for number in range(sources):
        own = chance.gauss(shift, bias)
        for _ in range(chance.choice((3, 8, 40))):
            found.append(Residual(f"source {number}", chance.gauss(own, noise), {}))
    return found


def test_a_new_source_lies_inside_as_often_as_promised() -> None:
    """Over many worlds: the range of 16 sources, against rows of sources that come after them."""
    inside = []
    for world in range(25):
        band = band_of(drawn(world, 16, shift=0.03))
        inside += [cover("new", [row], band).inside for row in drawn(1000 + world, 40, shift=0.03)[::5]]
    assert COVERAGE - 0.02 < fmean(inside) < COVERAGE + 0.08


def test_leaving_sources_out_measures_the_same() -> None:
    measured = [fmean(one.inside for one in coverage_of(drawn(world, 16))) for world in range(8)]
    assert COVERAGE - 0.04 < fmean(measured) < COVERAGE + 0.08


def test_a_source_of_many_rows_does_not_drown_the_others() -> None:
    few = [Residual(f"source {n}", error, {}) for n in range(9) for error in (-0.2, 0.2)]
    many = [Residual("large", 0.001, {})] * 10_000
    assert band_of(few + many).high == pytest.approx(0.2, rel=0.05)


def test_slow_errors_widen_the_slow_side() -> None:
    slow = [Residual(f"source {n}", 0.02 * n, {}) for n in range(10)]
    band = band_of(slow)
    assert band.high > 2 * -band.low > 0


def test_a_trait_with_larger_errors_gets_a_wider_range_drawn_to_the_whole() -> None:
    chance, rows = random.Random(1), []
    for number in range(12):
        kind, size = ("eager", 0.2) if number % 2 else ("fused", 0.05)
        rows += [Residual(f"source {number}", chance.gauss(0, size), {"system": kind}) for _ in range(30)]
    factors = band_of(rows).factors["system"]
    assert 1 < factors["eager"] < 1.6  # 1.6: what the six sources alone would say
    assert 0.4 < factors["fused"] < 1
    # One source says little.
    alone = [row._replace(traits={"system": "odd"}) if row.source == "source 1" else row for row in rows]
    assert 1 < band_of(alone).factors["system"]["odd"] < 1.15


def test_what_is_outside_is_told_by_side() -> None:
    band = band_of([Residual(f"source {n}", error, {}) for n in range(5) for error in (-0.1, 0.1)])
    rows = [Residual("new", error, {}) for error in (-0.5, 0.0, 0.0, 0.5)]
    found = cover("new", rows, band)
    assert (found.inside, found.below, found.above) == (0.5, 0.25, 0.25)


def test_ranges_do_not_depend_on_the_order_of_rows() -> None:
    rows = drawn(3, 8)
    assert band_of(rows) == band_of(rows)
    shuffled = random.Random(5).sample(rows, len(rows))
    assert band_of(shuffled).high == pytest.approx(band_of(rows).high, abs=1e-12)


def test_quantiles_by_weight() -> None:
    assert quantile([(1.0, 1.0), (2.0, 1.0), (3.0, 2.0)], 0.5) == 2.0
    assert quantile([(1.0, 1.0), (2.0, 1.0), (3.0, 2.0)], 0.51) == 3.0
    assert quantile([(1.0, 1.0), (2.0, 1.0)], 1.2) == 2.0


def test_one_source_has_no_others() -> None:
    assert coverage_of([Residual("one", 0.1, {})]) == []
