"""A long step is timed by two short ones: to a thousandth of what the whole schedule takes, and by proof."""

import random

import pytest

from fivefold.layout.layout import Layout
from fivefold.layout.stages import schedule_of
from fivefold.schedules.costs import Costs, MessageLink
from fivefold.schedules.registry import CATALOGUE, build
from fivefold.schedules.schedule import Placement, Schedule
from fivefold.schedules.simulate import Simulation, simulate
from fivefold.schedules.steady_state import TimedStep, time_steps
from fivefold.spec.presets import preset

REPEATING = [name for name, record in CATALOGUE.items() if record.repeats]
ROUNDS = 3  # as the planner's


def _makespan(run: Simulation) -> list[float]:
    return [run.makespan]


def _timed(name: str, p: int, m: int, costs: Costs, chunks: int) -> TimedStep:
    record = CATALOGUE[name]
    period = record.period(p, m)

    def shorter(few: int) -> Schedule:
        return build(name, p, few, chunks=chunks, group=period if record.group else None)

    return time_steps(shorter, costs, m, ROUNDS * period + m % period, period)


def _random_costs(dice: random.Random, placement: Placement) -> Costs:
    """Stages that take the same time, nearly the same, or times of their own; messages that do and do not hide."""
    spread = dice.choice([0.0, 0.03, 0.5])

    def stages(mean: float) -> tuple[float, ...]:
        return tuple(mean * dice.uniform(1 - spread, 1 + spread) for _ in placement.owner)

    f, i, w = stages(1.0), stages(dice.uniform(0.8, 1.4)), stages(dice.uniform(0.5, 1.1))
    link = MessageLink(latency=dice.choice([0.0, 0.05, 0.3, 1.0]))
    b = tuple(x + y for x, y in zip(i, w, strict=True))
    return Costs(f=f, i=i, w=w, b=b, activation=(1.0,) * len(f), link=link)


def test_three_hundred_random_schedules_take_what_they_take_when_walked_whole() -> None:
    dice, shortened = random.Random(0), 0
    for _ in range(300):
        name, p = dice.choice(REPEATING), dice.choice([2, 3, 4])
        record = CATALOGUE[name]
        chunks = dice.choice([2, 3]) if record.any_chunks else record.chunks
        m = dice.randint(5 * p, 14 * p)
        costs = _random_costs(dice, record.placement(p, chunks))
        timed = _timed(name, p, m, costs, chunks)
        whole = simulate(build(name, p, m, chunks=chunks), costs)
        shortened += timed.longer is not None
        exact = 1e-9 if timed.longer is None else 1e-3
        assert timed.total(_makespan) == pytest.approx(_makespan(whole), rel=exact), (name, p, m, costs)
    assert shortened > 150


def test_a_pace_that_changes_after_many_microbatches_is_seen() -> None:
    """The first of two ranks is a little slower than the other, and held up by it at first."""
    p, m, each = 2, 128, (1.03, 1.0, 1.0, 1.0)
    link = MessageLink(latency=0.3)
    costs = Costs(f=each, i=each, w=each, b=tuple(2 * x for x in each), activation=(1.0,) * 4, link=link)
    short, longer = (simulate(build("interleaved", p, few, chunks=2), costs) for few in (6, 8))
    whole = simulate(build("interleaved", p, m, chunks=2), costs)
    straight = short.makespan + (m - 6) / p * (longer.makespan - short.makespan)
    assert straight != pytest.approx(whole.makespan, rel=0.01)
    timed = _timed("interleaved", p, m, costs, 2)
    assert timed.total(_makespan) == pytest.approx(_makespan(whole), rel=1e-3)


@pytest.mark.parametrize("name", ["gpipe", "bfs"])
def test_a_schedule_without_a_steady_state_is_walked_whole(name: str) -> None:
    costs = Costs.even(CATALOGUE[name].placement(3, CATALOGUE[name].chunks))
    timed = _timed(name, 3, 40, costs, CATALOGUE[name].chunks)
    assert timed.longer is None
    assert timed.simulation.schedule.m == 40


@pytest.mark.parametrize("name", [name for name in REPEATING if CATALOGUE[name].planned])
@pytest.mark.parametrize("m", [31, 47, 64])
def test_a_shorter_schedule_holds_the_same_activations(name: str, m: int) -> None:
    layout = Layout.parse(f"pp=4,schedule={name},microbatches={m}")
    period = layout.record.period(4, m)
    few = ROUNDS * period + m % period
    short, whole = (schedule_of(preset("llama3-8b"), layout, 8192, count) for count in (few, m))
    assert short.in_flight == whole.in_flight
    assert short.p2p_in_flight == whole.p2p_in_flight
