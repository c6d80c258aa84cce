"""A trace made by hand, whose parts can be added up on paper."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.schedules.actions import BACKWARD, FORWARD, SEND_ACTIVATION, SEND_GRADIENT, Action
from fivefold.schedules.classic import one_f_one_b
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.text import read_text
from fivefold.tracing.chrome import write_trace
from fivefold.tracing.records import Flight, NamedSpan, RankTrace, StepWindow, Trace, Wait, end_sends_at_consumers
from fivefold.tracing.summary import TraceSummary

ALONE: Any = {"rank": 0, "name": "", "pipeline": 0, "pp_rank": 0}


def by_hand() -> Trace:
    """Two ranks, one microbatch: F on 0 at 1-2, on 1 at 3-5; B on 1 at 5-8, on 0 at 9-11; the step ends at 14."""
    schedule = one_f_one_b(2, 1)
    send_a, send_g = Action(SEND_ACTIVATION, 0, 0), Action(SEND_GRADIENT, 1, 0)
    first = RankTrace(
        rank=0,
        name="pp0",
        pipeline=0,
        pp_rank=0,
        steps=(StepWindow(1, 0.0, 14.0),),
        actions=(BusySpan(Action(FORWARD, 0, 0), 1.0, 2.0), BusySpan(Action(BACKWARD, 0, 0), 9.0, 11.0)),
        updates=(NamedSpan("STEP", 12.0, 13.5),),
        waits=(
            Wait("pp", "receive", 2.5, 9.0, Action(BACKWARD, 0, 0)),
            Wait("tp", "all-reduce", 9.5, 10.0, Action(BACKWARD, 0, 0)),  # within an action
            Wait("dp", "all-reduce", 11.5, 12.5),  # half of it in the optimizer
        ),
        flights=(
            Flight("pp", "send", 100, 2.0, 11.0, send_a),  # noticed late; its consumer starts at 3
            Flight("tp", "all-reduce", 10, 9.2, 10.0, Action(BACKWARD, 0, 0)),
            Flight("dp", "all-reduce", 40, 10.5, 12.5),
        ),
    )
    second = RankTrace(
        rank=1,
        name="pp1",
        pipeline=0,
        pp_rank=1,
        steps=(StepWindow(1, 0.5, 14.0),),
        actions=(BusySpan(Action(FORWARD, 1, 0), 3.0, 5.0), BusySpan(Action(BACKWARD, 1, 0), 5.0, 8.0)),
        updates=(NamedSpan("STEP", 12.0, 13.0),),
        waits=(
            Wait("pp", "receive", 1.0, 3.0, Action(FORWARD, 1, 0)),
            Wait("dp", "all-reduce", 8.5, 12.0),  # till 11 it would have had nothing to do anyway
        ),
        flights=(Flight("pp", "send", 100, 8.0, 13.0, send_g), Flight("dp", "all-reduce", 40, 7.5, 12.0)),
    )
    return Trace(schedule, (first, second), "pp=2")


def test_each_moment_of_a_step_is_in_one_part() -> None:
    first, second = TraceSummary(by_hand()).by_rank
    assert (first.step, first.compute, first.bubble, first.wait) == (14.0, 2.5, 7.0, 6.5)
    assert first.exposed == {"pp": 0.0, "tp": 0.5, "dp": 1.0}
    assert (first.optimizer, first.other) == (1.0, pytest.approx(2.0))  # 0-1, 11-11.5, 13.5-14
    assert first.hidden == {"pp": pytest.approx(1.0), "tp": pytest.approx(0.3), "dp": pytest.approx(1.0)}
    assert (second.step, second.compute, second.bubble, second.wait) == (13.5, 5.0, 5.0, 2.0)
    assert second.exposed == {"pp": 0.0, "dp": 1.0}
    assert (second.optimizer, second.other) == (1.0, pytest.approx(1.5))
    assert second.hidden == {"pp": pytest.approx(1.0), "dp": pytest.approx(3.5)}
    for time in (first, second):
        assert time.compute + time.bubble + time.optimizer + time.other + sum(time.exposed.values()) == time.step


def test_spans_that_overlap_count_once_in_any_order() -> None:
    """Waits at 4-6, 0-2, 1-3 and 5-5 cover 0-3 and 4-6; an action covers 2-5, and a flight all of it."""
    times = ((4.0, 6.0), (0.0, 2.0), (1.0, 3.0), (5.0, 5.0))
    rank = RankTrace(
        **ALONE,
        steps=(StepWindow(1, -1.0, 7.0),),
        actions=(BusySpan(Action(FORWARD, 0, 0), 2.0, 5.0),),
        updates=(NamedSpan("STEP", 5.0, 6.5),),
        waits=tuple(Wait("tp", "all-reduce", start, end) for start, end in times),
        flights=(Flight("tp", "all-reduce", 8, -2.0, 9.0),),
    )
    (time,) = TraceSummary(Trace(one_f_one_b(1, 1), (rank,))).by_rank
    assert (time.step, time.exposed, time.compute, time.hidden) == (8.0, {"tp": 5.0}, 1.0, {"tp": 3.0})
    assert (time.optimizer, time.bubble, time.other) == (0.5, 0.0, 1.5)


def test_bubbles_are_shares_of_the_run_measured_and_predicted() -> None:
    """Measured: 8 of 20 rank-seconds busy. Predicted: F 1, F 2, B 3, B 2 one after the other, 8 of 16."""
    summary = TraceSummary(by_hand())
    assert summary.makespan(0, 0) == 10.0
    assert summary.simulations[0].makespan == 8.0
    assert summary.simulations[0].bubble_makespan == pytest.approx(0.5)
    assert (summary.bubble.measured, summary.bubble.predicted) == (pytest.approx(0.6), pytest.approx(0.5))
    assert summary.bubble_of(summary.trace.ranks[0]).measured == pytest.approx(0.7)


def test_a_message_has_landed_when_its_consumer_starts() -> None:
    first, second = end_sends_at_consumers(by_hand()).ranks
    assert [flight.end for flight in first.flights] == [3.0, 10.0, 12.5]
    assert [flight.end for flight in second.flights] == [9.0, 12.0]


def test_ranks_of_another_clock_are_moved() -> None:
    trace = by_hand()
    moved = trace.ranks[1].on_clock(100.0)
    assert (moved.steps[0].start, moved.actions[0].end, moved.waits[0].start) == (100.5, 105.0, 101.0)
    assert TraceSummary(replace(trace, ranks=(trace.ranks[0], moved.on_clock(-100.0)))).total.step == 13.75


def in_turns() -> Trace:
    """One rank, two microbatches: F0 at 0-3; F1 and B0 in turns, 3-4, 4-6, 6-7, 7-8; B1 at 8-12. Tokens of F1 travel at
    4-6.5, those of B0 at 6-7.5."""
    schedule = read_text("schedule pairs\nstages 0\nmicrobatches 2\nrank 0\n  F0.0 F0.1&B0.0 B0.1\n").schedule
    first, joined, other, last = schedule.compute(0)
    spans = [(first, 0, 3), (joined, 3, 4), (other, 4, 6), (joined, 6, 7), (other, 7, 8), (last, 8, 12)]
    rank = RankTrace(
        **ALONE,
        steps=(StepWindow(1, 0.0, 12.0),),
        actions=tuple(BusySpan(action, float(start), float(end)) for action, start, end in spans),
        updates=(),
        action_parts=(NamedSpan("dispatch", 3.5, 4.0), NamedSpan("combine", 7.0, 7.5)),
        waits=(Wait("ep", "all-to-all", 6.0, 6.5, joined), Wait("ep", "all-to-all", 7.0, 7.5, other)),
        flights=(Flight("ep", "all-to-all", 8, 4.0, 6.5, joined), Flight("ep", "all-to-all", 8, 6.0, 7.5, other)),
    )
    return Trace(schedule, (rank,), "ep=2")


def test_halves_in_turns_count_once_and_are_timed_as_a_pair() -> None:
    summary = TraceSummary(in_turns())
    [time] = summary.by_rank
    assert (time.step, time.compute, time.bubble) == (12.0, 11.0, 0.0)
    assert (time.exposed, time.hidden) == ({"ep": 1.0}, {"ep": pytest.approx(2.5)})
    # By itself a pass takes 3 and 4; both halves of the pair, 5.
    [simulation] = summary.simulations
    assert (simulation.costs.f, simulation.costs.b, simulation.costs.pair) == ((3.0,), (4.0,), (5.0,))
    assert simulation.makespan == 12.0


def test_the_second_half_has_a_lane_of_its_own(tmp_path: Path) -> None:
    write_trace(TraceSummary(in_turns()), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = [(lanes[e["tid"]], e["name"], e["ts"] / 1e6) for e in events if e["ph"] == "X"]
    assert [one for one in drawn if one[0] in ("compute", "beside")] == [
        ("compute", "F0.0", 0.0), ("compute", "F0.1", 3.0), ("beside", "B0.0", 4.0), ("compute", "F0.1", 6.0),
        ("beside", "B0.0", 7.0), ("compute", "B0.1", 8.0), ("compute", "dispatch", 3.5), ("beside", "combine", 7.0),
    ]  # fmt: skip
    pair = [one for one in drawn if one[0] == "simulated"][1:3]
    assert [name for _, name, _ in pair] == ["F0.1", "B0.0"]
    assert pair[1][2] == pytest.approx(3 + 5 * 3 / 7)  # the pair's time, divided as by themselves
