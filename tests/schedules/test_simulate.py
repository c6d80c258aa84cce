"""The clock: against a second implementation, against rules of thumb, and with links that matter."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fivefold.schedules.actions import Action, Kind
from fivefold.schedules.check import check, prove
from fivefold.schedules.classic import interleaved_unchecked
from fivefold.schedules.clock import run
from fivefold.schedules.communication import wire, with_zero
from fivefold.schedules.costs import Costs, Durations, MessageLink
from fivefold.schedules.registry import CATALOGUE, build
from fivefold.schedules.schedule import Placement, Schedule
from fivefold.schedules.simulate import simulate
from fivefold.support.errors import UserError
from tests.schedules.early import posted_early
from tests.schedules.slow_clock import ends
from tests.schedules.strategies import schedules

times = st.floats(0.05, 3.0)


LINKS = st.builds(
    MessageLink,
    latency=st.sampled_from([0.0, 0.3, 4.0]),
    bandwidth=st.sampled_from([float("inf"), 10.0]),
    message=st.sampled_from([0.0, 4.0, 40.0]),
    sends=st.sampled_from(["eager", "blocking"]),
    overlap=st.booleans(),
)


@given(schedules(most_ranks=4, most_rounds=2), LINKS, st.data())
def test_every_action_ends_when_the_slow_clock_says(schedule: Schedule, link: MessageLink, data: st.DataObject) -> None:
    f, i, w, fb = ([data.draw(times) for _ in range(schedule.placement.stages)] for _ in range(4))
    costs = Costs.even(schedule.placement, f, i, w, fb=data.draw(st.sampled_from([None, fb])), link=link)
    buffers = data.draw(st.sampled_from([1, 2, schedule.buffers, schedule.m]))
    early = data.draw(st.booleans())
    rewired = posted_early(schedule, buffers) if early else replace(schedule, buffers=buffers)
    assume(not run(rewired, costs).blocks)
    expected = ends(rewired, costs)
    for spans in simulate(rewired, costs).timeline:
        for action, _, end in spans:
            assert end == pytest.approx(expected[str(action)])


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("sizes", [((2, 8), (4, 16)), pytest.param(((8, 32),), marks=pytest.mark.slow)])
def test_the_buffers_of_a_schedule_do_not_slow_it_down(name: str, sizes: tuple[tuple[int, int], ...]) -> None:
    for p, m in sizes:
        schedule = build(name, p, m)
        orders = [schedule.compute(rank) for rank in range(p)]
        roomy = wire(name, schedule.placement, m, orders, buffers=m)
        for latency in (0.0, 0.1, 0.4):
            costs = Costs.even(schedule.placement, link=MessageLink(latency=latency))
            assert simulate(schedule, costs).makespan == pytest.approx(simulate(roomy, costs).makespan), (p, latency)


def test_busy_wait_and_idle_add_up_to_the_makespan() -> None:
    simulation = simulate(build("1f1b", 4, 8))
    for rank, time in enumerate(simulation.ranks):
        assert time.busy == 24
        assert time.idle == 2 * rank + rank  # late start, early end
        assert time.busy + time.wait + time.idle == simulation.makespan == 33


def test_the_two_bubbles_measure_different_things() -> None:
    simulation = simulate(build("zb-h2", 4, 8))
    assert simulation.bubble_span == 0
    assert simulation.bubble_makespan == pytest.approx(3 / 27)


def test_the_makespan_begins_with_the_step_not_with_the_first_action() -> None:
    schedule = with_zero(build("1f1b", 1, 4), 1)
    simulation = simulate(schedule, replace(Costs.even(schedule.placement), gather=4.0))
    assert simulation.bubble_makespan == 4 / 16
    assert simulation.bubble_span == 0


def test_a_joined_pair_counts_its_time_once() -> None:
    schedule = build("dualpipe-v", 4, 8)
    simulation = simulate(schedule, Costs.even(schedule.placement, fb=2.0))
    assert all(rank.busy <= simulation.makespan for rank in simulation.ranks)
    assert simulation.ranks[0].busy == pytest.approx(24 - 5 * 0.5)  # five pairs, each half a unit shorter than F + B


def test_a_joined_pair_takes_the_time_of_its_forwards_stage() -> None:
    schedule = build("dualpipe-v", 2, 6)
    simulation = simulate(schedule, Costs.even(schedule.placement, fb=[1.25, 1.5, 1.75, 2.0]))
    pairs = [span for spans in simulation.timeline for span in spans if span.action.joined]
    assert {span.action.stage for span in pairs} == {0, 1, 2, 3}
    assert all(span.end - span.start == 1.25 + 0.25 * span.action.stage for span in pairs)


def test_a_joined_pair_with_experts_takes_what_its_halves_play() -> None:
    schedule = build("dualpipe-v", 2, 6)
    costs = Costs.even(schedule.placement, f=[1, 2, 3, 4], i=[1, 2, 3, 4], ep=[0, 0.5, 0.5, 1])
    # By the rule, F of stage 3 (1.5, a message of 0.5, 1.5, another) with B of stage 0 (5, no message): 0 hidden after
    # the first. The B runs to its end while the F's first message is on its way, and its second has nothing beside it.
    assert costs.joined(3, 0) == 4 + costs.b[0] - 0.5
    assert costs.joined(0, 3) == 1 + costs.b[3]  # an F without messages ends before the B begins
    assert costs.joined(1, 2) < costs.f[1] + costs.b[2]
    simulation = simulate(schedule, costs)
    for spans in simulation.timeline:
        for first, second in pairwise(spans):
            if first.action.joined:
                length = costs.joined(first.action.stage, second.action.stage)
                assert first.end - first.start == pytest.approx(length)
    slower = costs.slowed(schedule.placement, {0: 2.0, 1: 2.0})
    assert simulate(schedule, slower).makespan == pytest.approx(2 * simulation.makespan)


def test_messages_are_a_part_of_every_pass() -> None:
    with pytest.raises(UserError, match=r"ep=2 of stage 1 is a part of its passes.* takes 1; give at most that"):
        Costs.even(Placement.single(2), ep=[1, 2])
    with pytest.raises(UserError, match="both say how long a joined pair takes"):
        Durations.parse("ep=0.2,fb=2")
    assert Durations.parse("ep=0.2").costs(Placement.vee(2)) == Costs.even(Placement.vee(2), ep=0.2)


def test_the_span_bubble_is_that_of_the_rank_that_waits_longest_not_of_the_largest_share() -> None:
    placement = Placement.single(3)
    simulation = simulate(build("1f1b", 3, 2), Costs.even(placement, i=[2, 1, 4]))
    waits, shares = [rank.wait for rank in simulation.ranks], [rank.wait / rank.span for rank in simulation.ranks]
    assert waits.index(max(waits)) != shares.index(max(shares))
    assert simulation.bubble_span == shares[waits.index(max(waits))]


def test_memory_is_a_curve_that_returns_to_nothing() -> None:
    for name in CATALOGUE:
        simulation = simulate(build(name, 4, 8))
        for steps, peak in zip(simulation.memory, simulation.peak_activations, strict=True):
            assert steps[-1][1] == pytest.approx(0)
            assert max(live for _, live in steps) == peak
            assert [time for time, _ in steps] == sorted(time for time, _ in steps)


def test_a_slow_rank_sets_the_pace() -> None:
    placement = Placement.single(4)
    costs = Costs.even(placement).slowed(placement, {2: 1.5})
    simulation = simulate(build("1f1b", 4, 32), costs)
    assert simulation.ranks[2].busy == 1.5 * simulation.ranks[0].busy
    assert simulation.makespan > 32 * 3 * 1.5


def test_a_stage_without_layers_takes_no_time() -> None:
    schedule = build("interleaved", 4, 8, chunks=2)
    empty_ends = [0.0] + [0.5] * 6 + [0.0]
    simulation = simulate(schedule, Costs.even(schedule.placement, empty_ends, empty_ends, empty_ends))
    assert simulation.ranks[0].busy == simulation.ranks[3].busy == 12
    assert simulation.makespan < simulate(schedule).makespan


# ---- links ---------------------------------------------------------------------------------------------------------


def linked(name: str, link: MessageLink, m: int = 8) -> float:
    schedule = build(name, 4, m)
    return simulate(schedule, Costs.even(schedule.placement, link=link)).makespan


def test_latency_and_bandwidth_add_up_and_are_paid_once_per_hop_when_nothing_hides_them() -> None:
    for link in (MessageLink(latency=0.25), MessageLink(latency=0.1, bandwidth=40, message=6)):
        assert linked("naive", link, m=1) == pytest.approx(12 + 6 * 0.25)


def test_a_narrow_link_sets_the_pace() -> None:
    # Messages of gpipe's forwards leave one after the other: each keeps the channel for 4 while a forward takes 1.
    narrow = linked("gpipe", MessageLink(bandwidth=1, message=4), m=8)
    assert narrow > 2 * 8 * 4
    assert linked("gpipe", MessageLink(latency=4), m=8) < narrow


def test_blocking_sends_cost_more_than_eager_ones_and_no_overlap_more_still() -> None:
    eager = linked("1f1b", MessageLink(latency=0.2))
    blocking = linked("1f1b", MessageLink(latency=0.2, sends="blocking"))
    exposed = linked("1f1b", MessageLink(latency=0.2, overlap=False))
    assert eager < blocking
    assert eager <= exposed
    assert linked("gpipe", MessageLink(latency=0.2)) < linked("gpipe", MessageLink(latency=0.2, overlap=False))


def test_blocking_sends_without_early_receives_deadlock_as_they_do_in_life() -> None:
    # Rank 0 sends an activation down, rank 1 a gradient up, and each waits for the other to listen.
    with pytest.raises(UserError, match=r"1f1b deadlocks: .* a circle of"):
        linked("1f1b", MessageLink(latency=0.2, sends="blocking", overlap=False))


def crossed() -> Schedule:
    """Rank 1 takes its two messages in the other order than they are sent: fine, if both receives are posted before."""
    first = [Action(kind, 0, k) for kind in (Kind.FORWARD, Kind.BACKWARD) for k in (0, 1)]
    second = [Action(Kind.FORWARD, 1, 1), Action(Kind.FORWARD, 1, 0), *(Action(Kind.BACKWARD, 1, k) for k in (0, 1))]
    return prove(wire("crossed", Placement.single(2), 2, [first, second]))


GROUPED = {group: build("interleaved", 2, 8, group=group) for group in (2, 8)}


@pytest.mark.parametrize(
    ("schedule", "link", "causes"),
    [
        # A list with early receives, which the checker refuses: a proven one runs with blocking sends alone.
        (posted_early(GROUPED[8], 4), MessageLink(sends="blocking"), r"blocking sends \(--sends blocking\):"),
        (crossed(), MessageLink(overlap=False), r"receives that are posted late \(--no-overlap\):"),
        (
            GROUPED[2],
            MessageLink(sends="blocking", overlap=False),
            r"sends blocking\) and receives .* \(--no-overlap\):",
        ),
    ],
)
def test_a_schedule_that_deadlocks_on_another_link_only_names_the_link(
    schedule: Schedule, link: MessageLink, causes: str
) -> None:
    with pytest.raises(UserError, match=rf"The cause is .*{causes} it runs with eager sends and receives posted where"):
        simulate(schedule, Costs.even(schedule.placement, link=link))


@given(schedules(most_ranks=5), st.sampled_from([0.0, 0.3]))
def test_a_proven_schedule_runs_with_blocking_sends(schedule: Schedule, latency: float) -> None:
    costs = Costs.even(schedule.placement, link=MessageLink(latency=latency, sends="blocking"))
    assert not check(schedule)
    assert not run(schedule, costs).blocks


def test_a_schedule_that_deadlocks_on_any_link_does_not_blame_the_link() -> None:
    schedule = interleaved_unchecked(4, 8, 2, group=3)
    with pytest.raises(UserError) as caught:
        simulate(schedule, Costs.even(schedule.placement, link=MessageLink(sends="blocking")))
    assert "The cause" not in str(caught.value)


def test_a_send_waits_when_all_its_buffers_are_in_flight() -> None:
    schedule = build("gpipe", 2, 6)
    costs = Costs.even(schedule.placement, link=MessageLink(latency=10))
    tight = posted_early(schedule, buffers=1)
    assert simulate(tight, costs).makespan > simulate(schedule, costs).makespan
    # With one buffer the second message cannot be handed over before the first has arrived, at 11; then F0.2 runs.
    assert [span.end for span in simulate(tight, costs).timeline[0][:3]] == [1, 2, 12]


# ---- the optimizer -------------------------------------------------------------------------------------------------


def test_gathers_delay_the_first_forward_and_reductions_the_step() -> None:
    schedule = with_zero(build("1f1b", 1, 4), 1)
    costs = replace(Costs.even(schedule.placement), gather=2.0, reduce=3.0, step=5.0)
    simulation = simulate(schedule, costs)
    assert simulation.timeline[0][0].start == 2
    assert simulation.makespan == 2 + 12 + 3 + 5


@pytest.mark.parametrize(("reduce", "makespan"), [(1.0, 12 + 1), (5.0, 3 + 4 * 5)])
def test_reductions_of_stage_two_run_beside_compute_and_one_after_the_other(reduce: float, makespan: float) -> None:
    """The first begins with the first gradient, and long ones queue behind it."""
    schedule = with_zero(build("1f1b", 1, 4), 2)
    assert simulate(schedule, replace(Costs.even(schedule.placement), reduce=reduce)).makespan == makespan


def test_stage_three_is_not_written_into_schedules() -> None:
    with pytest.raises(UserError, match="zero=3"):
        with_zero(build("1f1b", 2, 2), 3)


# ---- bad costs -----------------------------------------------------------------------------------------------------


def test_times_must_fit_the_stages() -> None:
    four = Placement.single(4)
    cases: dict[str, Callable[[], object]] = {
        "f has 3 times, and there are 4 stages": lambda: Costs.even(four, [1, 1, 1]),
        "w=-1 is not a duration": lambda: Costs.even(four, w=-1),
        r"f=1e\+308 is not a duration": lambda: Costs.even(four, f=1e308),
        "f has times for 2 stages, and w for 1": lambda: Costs((1, 1), (1, 1), (1,), b=(2, 2), activation=(1, 1)),
        "1f1b has 4 stages, and the costs have 2": lambda: simulate(
            build("1f1b", 4, 8), Costs.even(Placement.single(2))
        ),
        "rank 7 cannot be slowed": lambda: Costs.even(four).slowed(four, {7: 2}),
    }
    for sentence, made in cases.items():
        with pytest.raises(UserError, match=sentence):
            made()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"latency": -1.0}, "a latency of -1"),
        ({"latency": float("nan")}, "a latency of nan"),
        ({"bandwidth": 0.0}, "the bandwidth must be above zero"),
        ({"bandwidth": float("nan")}, "the bandwidth must be above zero"),
        ({"message": -1.0}, "the message zero or more"),
        ({"bandwidth": 1e-300, "message": 1e10}, "= inf on the link"),
        ({"sends": "lazy"}, "'eager' or 'blocking', not 'lazy'"),
    ],
)
def test_a_link_that_cannot_be_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        MessageLink(**wrong)


@pytest.mark.parametrize("owner", [(), (0, -1)])
def test_a_placement_that_cannot_be_is_refused(owner: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="there must be a stage, and ranks count from 0"):
        Placement(owner)
