"""The benchmark of pairs: what it makes of its marks, wires that are made up, and a tiny run."""

import time

import pytest
from benchmarks.overlap import IN_TURN, IN_TURNS, Delay, OverlapShape, Pass, WireDelay, app, limited, measure, predicted
from typer.testing import CliRunner

from fivefold.parallel.async_exchange import AsyncExchange
from fivefold.schedules.text import read_text
from fivefold.support.errors import UserError

SHAPE = OverlapShape(pp=1, microbatches=3, hidden=32, layers=1, seq=16, batch=6, link=1000.0, rounds=1, injected=True)


def test_the_simulator_is_given_what_was_measured() -> None:
    """A pass of 1 + 2 + 1 whose message of 2 the other half's compute hides."""
    text = "schedule pairs\nstages 0\nmicrobatches 3\nrank 0\n  F0.0 F0.1&B0.0 F0.2&B0.1 B0.2\n"
    halves = [(1.0, 2.0, 0.0), (1.0, 0.0, 0.0)]
    passes: list[Pass] = [(kind, 0, 4.0, halves) for kind in "FB" for _ in range(3)]
    made, hidden = predicted(read_text(text).schedule, passes)
    assert made[IN_TURN] == 6 * 4.0
    # F computes 1 and sends; B computes 1, beside half a message of F's, and sends; ...
    assert made[IN_TURNS] < made[IN_TURN]
    assert made[IN_TURN] - made[IN_TURNS] == pytest.approx(2 * hidden * 4.0)


def test_a_made_up_wire_is_shared_by_the_messages_under_way() -> None:
    delay, one, other = Delay(1000.0), *(AsyncExchange(None, "", None, None) for _ in range(2))  # type: ignore[arg-type]
    start = time.perf_counter()
    delay.begin(one, 50)
    delay.begin(other, 50)
    delay.end(one)
    delay.end(other)
    assert time.perf_counter() - start >= 0.0999  # both at a time: 50 ms of each by itself
    delay.begin(one, 10)
    time.sleep(0.02)
    start = time.perf_counter()
    delay.end(one)
    assert delay.left == {}
    assert time.perf_counter() - start < 5  # it had come meanwhile


def test_without_pairs_there_is_nothing_to_measure() -> None:
    for change, said in [
        ("--microbatches 3", "no pairs; nearest: 4"),
        ("--link 0", "is not a speed"),
        ("--rounds 0", "--rounds"),
        ("--batch 7", "nearest: batch=12"),
    ]:
        done = CliRunner().invoke(app, change.split())
        assert isinstance(done.exception, UserError)
        assert said in str(done.exception)


def test_where_no_namespace_can_be_made_the_delay_is_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with limited(2, 50.0) as wires:
        assert wires == WireDelay(50.0)
    assert "an injected delay, no real wire" in str(wires)


def test_a_tiny_run_computes_the_same_either_way() -> None:
    result = measure(SHAPE)
    assert result.ok
    assert [len(one) for one in result.times.values()] == [1, 1]
    assert result.simulated[IN_TURNS] <= result.simulated[IN_TURN]
    assert 0.0 <= result.hidden <= 1.0
    assert "an injected delay" in str(result)
