"""The greedy builder: never worse than the handcrafted schedules it competes with, and better where stages differ."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.schedule import Costs, Link, Placement, Schedule, build, check, peak_live, simulate
from fivefold.schedule.published import PUBLISHED


def makespan(schedule: Schedule, costs: Costs) -> float:
    return simulate(schedule, costs).makespan


@pytest.mark.parametrize(("p", "m", "slow"), [(4, 8, 1), (4, 8, 2), (4, 16, 1), (8, 32, 1), (8, 32, 3), (8, 32, 5)])
def test_one_slow_rank_and_no_more_memory_than_1f1b(p: int, m: int, slow: int) -> None:
    placement = Placement.single(p)
    costs = Costs.even(placement).slowed(placement, {slow: 1.5})
    schedule = build("auto", p, m, costs=costs)
    assert check(schedule) == []
    assert max(peak_live(order) for order in schedule.ranks) <= p
    assert makespan(schedule, costs) < makespan(build("zb-h1", p, m), costs) < makespan(build("1f1b", p, m), costs)


@pytest.mark.parametrize("slow", range(8))
def test_with_h2s_memory_a_slow_rank_never_waits_once_it_has_begun(slow: int) -> None:
    # Then nothing can be shorter: the slow rank starts as early as it can and works without a gap.
    placement = Placement.single(8)
    costs = Costs.even(placement).slowed(placement, {slow: 1.5})
    schedule = build("auto", 8, 32, costs=costs, memory=15)
    assert makespan(schedule, costs) == pytest.approx(slow + 32 * 4.5)


@pytest.mark.parametrize("row", PUBLISHED[:3], ids=lambda row: row.model)
def test_published_durations_are_met_with_the_handcrafted_memory(row: object) -> None:
    assert isinstance(row, type(PUBLISHED[0]))
    costs = Costs.even(Placement.single(row.p), row.f, row.i, row.w, link=Link(latency=row.comm))
    for name, memory in (("zb-h1", row.p), ("zb-h2", 2 * row.p - 1)):
        schedule = build("auto", row.p, row.m, costs=costs, memory=memory)
        assert makespan(schedule, costs) <= makespan(build(name, row.p, row.m), costs) * (1 + 1e-9)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_durations_and_any_memory(data: st.DataObject) -> None:
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    memory = data.draw(st.integers(1, 2 * p))
    f, i, w = ([data.draw(st.floats(0.1, 3)) for _ in range(p)] for _ in range(3))
    costs = Costs.even(Placement.single(p), f, i, w, link=Link(latency=data.draw(st.sampled_from([0, 0.05, 0.5]))))
    schedule = build("auto", p, m, costs=costs, memory=memory)
    assert check(schedule) == []
    assert max(peak_live(order) for order in schedule.ranks) <= memory
    if memory >= min(m, p):
        assert makespan(schedule, costs) <= makespan(build("zb-h1", p, m), costs) * (1 + 1e-9)


def test_more_memory_never_hurts() -> None:
    placement = Placement.single(6)
    costs = Costs.even(placement, 1.0, 1.1, 0.7, link=Link(latency=0.05)).slowed(placement, {1: 1.3, 4: 0.8})
    spans = [makespan(build("auto", 6, 18, costs=costs, memory=memory), costs) for memory in range(1, 13)]
    assert all(later <= earlier * 1.02 for earlier, later in pairwise(spans))
    assert spans[-1] < 0.5 * spans[0]


def test_uneven_stages_get_the_buffers_they_need() -> None:
    placement = Placement.single(8)
    costs = Costs.even(placement).slowed(placement, {2: 1.5})
    schedule = build("auto", 8, 32, costs=costs, memory=15)
    assert schedule.buffers > 2
    assert check(schedule) == []
