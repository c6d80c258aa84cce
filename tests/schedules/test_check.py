"""The checker earns trust by mutation: what is broken must be refused, with a sentence that says why."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fivefold.schedules.actions import Action, Kind, parse_token
from fivefold.schedules.check import check, prove
from fivefold.schedules.communication import wire
from fivefold.schedules.registry import build
from fivefold.schedules.schedule import Bounds, Placement, Schedule
from fivefold.support.errors import UserError
from tests.schedules.brute import trouble
from tests.schedules.early import posted_early
from tests.schedules.mutations import before, drop, duplicate, edited, find, hand_over, move, swap
from tests.schedules.strategies import schedules

F, B = Kind.FORWARD, Kind.BACKWARD


def verdict(schedule: Schedule) -> str:
    """The first problem, as people read it."""
    problems = check(schedule)
    assert problems, "the checker accepts it"
    return str(problems[0])


def places(schedule: Schedule) -> st.SearchStrategy[tuple[int, int]]:
    """Any rank and place of an action."""
    spots = [(rank, place) for rank, order in enumerate(schedule.ranks) for place in range(len(order))]
    return st.sampled_from(spots)


# ---- any single mutation -------------------------------------------------------------------------------------------


@given(st.data())
def test_no_action_can_be_dropped(data: st.DataObject) -> None:
    schedule = data.draw(schedules(most_ranks=4, zeros=True))
    rank, place = data.draw(places(schedule))
    # Without its only GATHER, a schedule of one stage is that of an unsharded optimizer, and as good.
    assume(schedule.placement.stages > 1 or schedule.ranks[rank][place].kind is not Kind.GATHER)
    assert check(drop(schedule, rank, place))


@given(st.data())
def test_no_action_can_be_run_twice(data: st.DataObject) -> None:
    schedule = data.draw(schedules(most_ranks=4, zeros=True))
    rank, place = data.draw(places(schedule))
    at = data.draw(st.integers(0, len(schedule.ranks[rank])))
    assert check(duplicate(schedule, rank, place, at))


@given(st.data())
def test_no_action_can_run_on_another_rank(data: st.DataObject) -> None:
    schedule = data.draw(schedules(most_ranks=4, zeros=True))
    assume(schedule.p > 1)
    rank, place = data.draw(places(schedule))
    other = data.draw(st.integers(0, schedule.p - 1).filter(lambda r: r != rank))
    mutant = hand_over(schedule, rank, place, other)
    assert f"rank {other} has {schedule.ranks[rank][place]}" in " ".join(map(str, check(mutant)))


@given(st.data())
@settings(max_examples=2 * settings.default.max_examples)
def test_what_passes_the_checker_runs_and_what_does_not_run_is_refused(data: st.DataObject) -> None:
    schedule = data.draw(schedules(most_ranks=4, most_rounds=2))
    for _ in range(data.draw(st.integers(1, 2))):
        rank, place = data.draw(places(schedule))
        to = data.draw(st.integers(0, len(schedule.ranks[rank]) - 1))
        schedule = data.draw(st.sampled_from([swap, move]))(schedule, rank, place, to)
    schedule = replace(schedule, buffers=data.draw(st.sampled_from([1, 2, schedule.buffers])))
    eager, meetings = trouble(schedule), trouble(schedule, meetings=True)
    refused = {found.obligation for found in check(schedule)}
    if not refused:
        assert (eager, meetings) == (None, None)
    elif refused == {"rendezvous"}:
        assert (eager, meetings) == (None, "deadlock")
    elif eager is None:
        # It runs; then it can only be refused for what running does not show: the order of sums, and bounds.
        assert refused <= {"accumulate", "bounds"}


@given(schedules(names=["1f1b", "zb-h1", "interleaved", "gpipe"], most_ranks=5), st.integers(1, 3))
def test_deadlock_by_scarce_buffers_is_seen_as_the_executor_sees_it(schedule: Schedule, buffers: int) -> None:
    scarce = posted_early(schedule, buffers)
    refused = {found.obligation for found in check(scarce)}
    assert refused <= {"deadlock", "rendezvous"}
    assert (trouble(scarce) == "deadlock") == ("deadlock" in refused)


# ---- each obligation, and how it speaks ----------------------------------------------------------------------------

ONE_F_ONE_B = build("1f1b", 4, 8)
ZERO_BUBBLE = build("zb-h1", 4, 8)


@pytest.mark.parametrize(
    ("schedule", "dropped", "sentence"),
    [
        (ONE_F_ONE_B, "F1.3", "rank 1 never runs F1.3"),
        (ONE_F_ONE_B, "B2.5", "rank 2 never runs a backward of F2.5: neither B nor I and W"),
        (ZERO_BUBBLE, "W2.5", "rank 2 runs I2.5 but never W2.5"),
        (ONE_F_ONE_B, "SEND_A1.3", "rank 1 never has SEND_A1.3, and stage 2 on rank 2 waits for it"),
        (ONE_F_ONE_B, "RECV_G1.3", "rank 1 never has RECV_G1.3, and stage 2 on rank 2 sends it"),
    ],
)
def test_what_is_missing_is_named_with_who_waits_for_it(schedule: Schedule, dropped: str, sentence: str) -> None:
    assert verdict(drop(schedule, *find(schedule, dropped))) == f"complete: {sentence}"


def test_a_second_copy_is_named_with_both_places() -> None:
    rank, place = find(ONE_F_ONE_B, "F0.1")
    sentence = verdict(duplicate(ONE_F_ONE_B, rank, place, len(ONE_F_ONE_B.ranks[0])))
    last = len(ONE_F_ONE_B.ranks[0])
    assert sentence == f"complete: rank 0 has F0.1 (action {last}) for the second time; the first is action {place}"


def test_the_wrong_rank_is_named_with_the_right_one() -> None:
    rank, place = find(ONE_F_ONE_B, "F1.0")
    sentence = verdict(hand_over(ONE_F_ONE_B, rank, place, 2))
    assert sentence == f"complete: rank 2 has F1.0 (action {place}), and stage 1 lives on rank 1"


@pytest.mark.parametrize(
    ("schedule", "rank", "action", "cause"),
    [
        (ONE_F_ONE_B, 1, Action(F, 9, 0), "and there are 4 stages, 0 to 3"),
        (ONE_F_ONE_B, 1, Action(F, 1, 8), "and there are 8 microbatches, 0 to 7"),
        (ONE_F_ONE_B, 1, Action(F, 1, -2), "and there are 8 microbatches, 0 to 7"),
        (ONE_F_ONE_B, 1, Action(F, -1, 0), "and there are 4 stages, 0 to 3"),
        (ONE_F_ONE_B, 1, Action(F, 1), "without a microbatch"),
        (ZERO_BUBBLE, 3, Action(B, 3, 7), "rank 3 runs B3.7 and also I3.7"),
        (build("zb-v", 2, 3), 1, Action(Kind.SEND_ACTIVATION, 1, 0), "no other rank at that end of stage 1"),
    ],
)
def test_what_does_not_exist_or_is_pointless_is_named(
    schedule: Schedule, rank: int, action: Action, cause: str
) -> None:
    assert cause in verdict(edited(schedule, rank, lambda order: order.append(action)))


@pytest.mark.parametrize(
    ("schedule", "moved", "other", "cause"),
    [
        (ONE_F_ONE_B, "F1.0", "RECV_A1.0", "rank 1 has F1.0 (action 0) before its input is received"),
        (ONE_F_ONE_B, "SEND_A0.1", "F0.1", "before there is an output to send: F0.1 is action"),
        (ONE_F_ONE_B, "B3.2", "F3.2", "rank 3 has B3.2"),
        (ONE_F_ONE_B, "SEND_G2.0", "B2.0", "before there is a gradient to send"),
        (ZERO_BUBBLE, "W0.1", "I0.1", "before the input gradient is there: I0.1 is action"),
        (build("zb-v", 2, 3), "F2.0", "F1.0", "before stage 1 has made its input"),
    ],
)
def test_what_runs_before_its_input_is_named(schedule: Schedule, moved: str, other: str, cause: str) -> None:
    sentence = verdict(before(schedule, moved, other))
    assert sentence.startswith("order: ")
    assert cause in sentence


@pytest.mark.parametrize(
    ("pairs", "m", "sentence"),
    [
        ("F0.0& B0.0", 1, "order: rank 0 joins F0.0 (action 0) with B0.0, which needs its result"),
        ("F0.0 B0.0& F0.1 B0.1", 2, "joins B0.0 (action 1) with F0.1; only an F and the B after it"),
        ("F0.0 F0.1& B0.0& F0.2 B0.1 B0.2", 3, "can be joined"),
    ],
)
def test_a_pair_is_a_forward_and_a_backward_that_does_not_need_it(pairs: str, m: int, sentence: str) -> None:
    order = [parse_token(one.rstrip("&"))[0]._replace(joined=one.endswith("&")) for one in pairs.split()]
    assert sentence in verdict(wire("pairs", Placement.single(1), m, [order]))


def test_a_joined_action_needs_a_partner() -> None:
    mutant = edited(ONE_F_ONE_B, 3, lambda order: order.insert(0, order.pop(2)._replace(joined=True)))
    assert any("only an F and the B after it can be joined" in str(problem) for problem in check(mutant))


def test_swapped_receives_are_named_with_both_ends() -> None:
    one, other = find(ONE_F_ONE_B, "RECV_A2.0"), find(ONE_F_ONE_B, "RECV_A2.1")
    mutant = swap(ONE_F_ONE_B, one[0], one[1], other[1])
    assert "rank 2 runs F2.0 on ('out', 1, 1)" in str(trouble(mutant))
    assert verdict(mutant) == (
        "channels: message 0 of the activations of stage 1 to stage 2 is SEND_A1.0 on rank 1 and RECV_A2.1 on rank 2: "
        "the two ends do not list the same order"
    )


def test_a_circle_of_waiting_ranks_is_named() -> None:
    placement = Placement.single(2)
    first = [Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)]
    second = [Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)]
    schedule = wire("circle", placement, 2, [first, second])
    assert trouble(schedule) == "deadlock"
    assert verdict(schedule) == (
        "deadlock: rank 0 waits at B0.0 for message 0 of the gradients of stage 1 to stage 0 from rank 1; rank 1 waits "
        "at F1.1 for message 1 of the activations of stage 0 to stage 1 from rank 0; that is a circle of 2, and nobody "
        "in it can move"
    )


def test_too_few_buffers_deadlock_and_the_send_is_named() -> None:
    schedule = posted_early(build("bfs", 2, 8), buffers=1)
    assert trouble(schedule) == "deadlock"
    assert "waits at SEND_A" in verdict(schedule)
    assert "posts the receive of message" in verdict(schedule)


def test_weight_gradients_out_of_order_are_named() -> None:
    mutant = before(ZERO_BUBBLE, "W3.6", "W3.5")
    assert trouble(mutant) is None
    assert verdict(mutant).startswith("accumulate: rank 3 has W3.6 (action ")
    assert "another order than on a single device" in verdict(mutant)


def test_more_activations_than_promised_are_named() -> None:
    promise = Bounds((4, 3, 1, 1))
    assert verdict(replace(ONE_F_ONE_B, promise=promise)) == (
        "bounds: rank 2 holds 2 stage activations from F2.1 (action 5) on, 2 at most, and 1 are promised"
    )


def test_more_posted_receives_than_buffers_are_named() -> None:
    mutant = replace(build("gpipe", 2, 4), buffers=1)
    assert "posts more than 1 receives RECV_A1 before their messages are consumed" in str(check(mutant))


def test_a_broken_promise_about_time_is_named() -> None:
    late = replace(ONE_F_ONE_B, promise=Bounds(slots=32))
    assert verdict(late) == (
        "bounds: rank 0 ends with B0.7 after 33 slots, and 32 are promised: the bubble is 1 slots larger than it "
        "should be"
    )


def test_a_rank_without_a_stage_is_named() -> None:
    schedule = Schedule("gap", Placement((0, 2)), 1, ((), (), ()))
    assert verdict(schedule) == "complete: rank 1 owns no stage"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"buffers": 0}, "8 microbatches and 0 buffers: both must be at least 1"),
        ({"promise": Bounds((4, 4))}, "a peak is promised for 2 ranks, and there are 4"),
        ({"ranks": ONE_F_ONE_B.ranks[:3]}, "there are action lists for 3 ranks, and stages on 4"),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(change: dict[str, Any], cause: str) -> None:
    assert verdict(replace(ONE_F_ONE_B, **change)) == f"complete: {cause}"


def test_prove_returns_what_holds_and_raises_what_does_not() -> None:
    assert prove(ONE_F_ONE_B) is ONE_F_ONE_B
    with pytest.raises(UserError, match=r"schedule 1f1b: complete: rank 1 never runs F1\.3"):
        prove(drop(ONE_F_ONE_B, *find(ONE_F_ONE_B, "F1.3")))


def test_a_flood_of_problems_is_cut_short() -> None:
    mutant = edited(build("1f1b", 2, 64), 1, lambda order: order.clear())
    with pytest.raises(UserError) as caught:
        prove(mutant)
    assert len(caught.value.problems) == 21
    assert "and 236 more problems" in caught.value.problems[-1]
