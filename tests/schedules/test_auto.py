"""The greedy builder: never worse than the handcrafted schedules it competes with, and better where stages differ."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.schedules.auto import AutoTask, Player, policies
from fivefold.schedules.check import check
from fivefold.schedules.clock import run
from fivefold.schedules.communication import wire
from fivefold.schedules.costs import MAX_DURATION, Costs, MessageLink
from fivefold.schedules.registry import build
from fivefold.schedules.result import PUBLISHED
from fivefold.schedules.schedule import Placement, Schedule, peak_live
from fivefold.schedules.simulate import simulate


def makespan(schedule: Schedule, costs: Costs) -> float:
    return simulate(schedule, costs).makespan


LONGER = [pytest.param(*one, marks=pytest.mark.slow) for one in ((4, 16, 1), (8, 32, 1), (8, 32, 5))]


@pytest.mark.parametrize(("p", "m", "slow"), [(4, 8, 1), (4, 8, 2), (8, 32, 3), *LONGER])
def test_one_slow_rank_and_no_more_memory_than_1f1b(p: int, m: int, slow: int) -> None:
    placement = Placement.single(p)
    costs = Costs.even(placement).slowed(placement, {slow: 1.5})
    schedule = build("auto", p, m, costs=costs)
    assert check(schedule) == []
    assert max(peak_live(order) for order in schedule.ranks) <= p
    assert makespan(schedule, costs) < makespan(build("zb-h1", p, m), costs) < makespan(build("1f1b", p, m), costs)


@pytest.mark.parametrize(("slow", "handcrafted", "ours"), [(0, 37.5, 37.5), (1, 38, 37.5), (2, 38.5, 38), (3, 39, 39)])
def test_where_auto_is_ahead_of_zb_h1_and_where_they_tie(slow: int, handcrafted: float, ours: float) -> None:
    placement = Placement.single(4)
    costs = Costs.even(placement).slowed(placement, {slow: 1.5})
    assert makespan(build("zb-h1", 4, 8), costs) == handcrafted
    assert makespan(build("auto", 4, 8, costs=costs), costs) == ours


@pytest.mark.parametrize("slow", [0, 2, 6, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (1, 3, 4, 5, 7))])
def test_with_h2s_memory_a_slow_rank_never_waits_once_it_has_begun(slow: int) -> None:
    # Then nothing can be shorter: the slow rank starts as early as it can and works without a gap.
    placement = Placement.single(8)
    costs = Costs.even(placement).slowed(placement, {slow: 1.5})
    schedule = build("auto", 8, 32, costs=costs, memory=15)
    assert makespan(schedule, costs) == pytest.approx(slow + 32 * 4.5)
    assert slow != 2 or schedule.buffers > 2  # uneven stages get the buffers that they need
    assert check(schedule) == []


@pytest.mark.parametrize(  # those of 14.6B parameters have twice the ranks and microbatches
    "row", [*PUBLISHED[:2], pytest.param(PUBLISHED[2], marks=pytest.mark.slow)], ids=lambda row: row.model
)
def test_published_durations_are_met_with_the_handcrafted_memory(row: object) -> None:
    assert isinstance(row, type(PUBLISHED[0]))
    costs = Costs.even(Placement.single(row.p), row.f, row.i, row.w, link=MessageLink(latency=row.comm))
    for name, memory in (("zb-h1", row.p), ("zb-h2", 2 * row.p - 1)):
        schedule = build("auto", row.p, row.m, costs=costs, memory=memory)
        assert makespan(schedule, costs) <= makespan(build(name, row.p, row.m), costs) * (1 + 1e-9)


LINKS = st.builds(
    MessageLink,
    latency=st.sampled_from([0.0, 0.05, 0.5]),
    bandwidth=st.sampled_from([float("inf"), 10.0]),
    message=st.sampled_from([0.0, 3.0]),
    sends=st.sampled_from(["eager", "blocking"]),
    overlap=st.booleans(),
)


@given(st.data())
def test_never_slower_than_a_handcrafted_schedule_that_fits_whatever_the_link(data: st.DataObject) -> None:
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    memory = data.draw(st.integers(1, 2 * p))
    f, i, w, b = ([data.draw(st.floats(0, 3)) for _ in range(p)] for _ in range(4))
    costs = Costs.even(Placement.single(p), f, i, w, b=data.draw(st.sampled_from([None, b])), link=data.draw(LINKS))
    schedule = build("auto", p, m, costs=costs, memory=memory)
    assert check(schedule) == []
    assert max(peak_live(order) for order in schedule.ranks) <= memory
    ours = makespan(schedule, costs)
    for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2"):
        other = build(name, p, m)
        if max(map(peak_live, other.ranks)) <= memory and not run(other, costs).blocks:
            assert ours <= makespan(other, costs) * (1 + 1e-9)


def test_work_that_takes_no_time_takes_no_time_and_the_longest_is_still_a_number() -> None:
    for times, takes in (
        ((0, 0, 0), lambda span: span == 0),
        ((MAX_DURATION, MAX_DURATION / 2, MAX_DURATION / 2), math.isfinite),
    ):
        costs = Costs.even(Placement.single(3), *times)
        assert takes(makespan(build("auto", 3, 4, costs=costs), costs))


@pytest.mark.parametrize(
    ("only", "p", "m", "memory", "f", "i", "w", "best", "without"),
    [
        ({"fill": "any"}, 3, 6, 3, (2, 2, 3), (2, 3, 1), (3, 3, 1), 50, 51),
        # Here a W only where it fits, and never elsewhere, would take 82 too.
        ({"fill": "longest"}, 4, 8, 4, (1, 2, 4, 4), (4, 2, 3, 2), (3, 2, 2, 2), 81, 82),
        ({"forward_first": True}, 3, 6, 3, (3, 2, 3), (3, 2, 3), (2, 3, 2), 54, 55),
        ({"forward_first": False}, 4, 8, 5, (1, 1, 2, 1), (2, 1, 3, 2), (2, 2, 1, 1), 52, 53),
    ],
)
def test_each_answer_of_a_policy_is_the_best_one_somewhere(
    only: dict[str, object],
    p: int,
    m: int,
    memory: int,
    f: tuple[float, ...],
    i: tuple[float, ...],
    w: tuple[float, ...],
    best: float,
    without: float,
) -> None:
    costs = Costs.even(Placement.single(p), f, i, w)
    task = AutoTask(p, m, costs, memory)
    spans: dict[bool, list[float]] = {True: [], False: []}
    ((question, answer),) = only.items()
    for policy in policies(task):
        schedule = wire("play", Placement.single(p), m, Player(task, policy).play(), buffers=m)
        spans[getattr(policy, question) == answer].append(makespan(schedule, costs))
    assert (min(spans[True]), min(spans[False])) == (best, without)
    assert makespan(build("auto", p, m, costs=costs, memory=memory), costs) == best


def test_more_memory_shortens_the_step_and_never_lengthens_it_here() -> None:
    placement = Placement.single(6)
    costs = Costs.even(placement, 1.0, 1.1, 0.7, link=MessageLink(latency=0.05)).slowed(placement, {1: 1.3, 4: 0.8})
    spans = [makespan(build("auto", 6, 18, costs=costs, memory=memory), costs) for memory in range(1, 13, 2)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(spans))
    assert spans[-1] < 0.5 * spans[0]
