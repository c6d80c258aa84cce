"""The Schedule view's figures are those of `draw` and `schedules`, and it says what each action waits for."""

import random

import pytest

import fivefold as ff
from fivefold.schedules.registry import CATALOGUE
from fivefold.schedules.result import compare
from fivefold.support.errors import UserError
from fivefold.web.question import Ask
from fivefold.web.report import answered_view
from fivefold.web.schedule import TIME_STEPS, every, is_large, made, payload

FAST = [name for name, one in CATALOGUE.items() if not one.uses_stage_times]


@pytest.mark.parametrize("seed", range(12))
def test_figures_are_those_of_draw(seed: int) -> None:
    draws = random.Random(seed)
    name, pp = FAST[seed % len(FAST)], draws.choice((2, 3, 4))
    m = draws.choice((2, 3, 4)) * pp
    times = f"f={draws.choice((0.8, 1.0, 1.6))},i=1.1,w=0.6,comm={draws.choice((0, 0.15))},ep=0.3"
    slow = draws.choice(("", f"{pp - 1}=1.5"))
    page = payload(Ask({"schedule": name, "pp": str(pp), "microbatches": str(m), "times": times, "slow": slow}))
    told = ff.draw(name, pp=pp, microbatches=m, times=times, slow=slow)
    whole = told.to_dict()
    drawn, (simulation,) = page["drawn"], told.simulations
    assert drawn["figures"] | {"ranks": drawn["ranks"], "timeline": whole["timeline"]} == whole
    assert drawn["memory"] == simulation.memory
    for rank, lane in enumerate(drawn["lanes"]):
        shown = [(one.action[:3], one.start, one.end, one.beside and one.beside[:3]) for one in simulation.drawn(rank)]
        assert [(one[:3], *one[3:5], one[5:] or None) for one in lane] == shown


@pytest.mark.parametrize("name", FAST)
def test_nothing_starts_before_what_it_waits_for(name: str) -> None:
    drawn = payload(Ask({"schedule": name, "pp": "3", "microbatches": "6", "times": "comm=0.2,ep=0.4"}))["drawn"]
    lanes, stages = drawn["lanes"], len(drawn["owner"])
    readers = 0
    for lane, needs in zip(lanes, drawn["needs"], strict=True):
        for one, reads in zip(lane, needs, strict=True):
            for rank, place in reads:
                assert lanes[rank][place][4] <= one[3] + 1e-9
                readers += 1
            assert len(reads) == 1 + (len(one) > 5) - sum(half[:2] == ("F", 0) for half in (one[:3], one[5:]))
    kinds = [kind for lane in lanes for one in lane for kind in (one[0], *one[5:6])]
    assert readers == len(kinds) - 6
    assert len(kinds) == stages * 6 * 2 + kinds.count("W")


def test_the_gradient_of_a_stage_comes_from_the_next() -> None:
    drawn = payload(Ask({"schedule": "1f1b", "pp": "2", "microbatches": "2"}))["drawn"]
    place = next(place for place, one in enumerate(drawn["lanes"][0]) if one[:3] == ("B", 0, 1))
    ((rank, source),) = drawn["needs"][0][place]
    assert (rank, drawn["lanes"][rank][source][:3]) == (1, ("B", 1, 1))


def test_all_schedules_are_those_of_schedules() -> None:
    words = {"pp": "4", "microbatches": "6", "times": "comm=0.1", "slow": "1=1.5"}
    told = {row["schedule"]: row for row in compare(4, 6, times="comm=0.1", slow="1=1.5").to_dict()["schedules"]}
    found = every(Ask(words))["schedules"]
    last = made(Ask(words))
    assert {row["schedule"] for row in found} | {last["schedule"]} == set(told)
    assert [row | {"lanes": 0} for row in found] == [told[row["schedule"]] | {"lanes": 0} for row in found]
    assert last["drawn"]["figures"] | {"needs": told["auto"]["needs"]} == told["auto"]
    times = [row["makespan"] for row in found if "makespan" in row]
    assert times == sorted(times)
    assert [row["schedule"] for row in found if "refused" in row] == ["dualpipe-v"]
    for row in found:
        assert max((max(lane["ends"]) for lane in row["lanes"]), default=TIME_STEPS) == TIME_STEPS


def test_what_is_refused_has_its_reason_and_the_sliders_stay() -> None:
    page = payload(Ask({"schedule": "dualpipe-v", "pp": "8", "microbatches": "8"}))
    assert page["drawn"] is None
    with pytest.raises(UserError) as told:
        ff.draw("dualpipe-v", pp=8, microbatches=8)
    assert page["refused"] == str(told.value)
    assert 16 in page["steps"]["microbatches"]


def test_chunks_go_to_those_that_take_them() -> None:
    words = {"pp": "4", "microbatches": "8", "chunks": "3"}
    assert payload(Ask(words | {"schedule": "interleaved"}))["drawn"]["figures"]["chunks"] == 3
    assert payload(Ask(words | {"schedule": "1f1b"}))["drawn"]["figures"]["chunks"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"schedule": "../1f1b.txt"}, "unknown schedule"),
        ({"pp": "256", "microbatches": "64"}, "more than the 8192 that a page draws"),
        ({"pp": "8192", "microbatches": "1"}, "pp=8192 is more than 256"),
        ({"pp": "0"}, "pp=0 must be at least 1"),
        ({"microbatches": "0"}, "microbatches=0 must be at least 1"),
        ({"schedule": "interleaved", "chunks": "0"}, "chunks=0 must be at least 1"),
        ({"schedule": "interleaved", "pp": "64", "microbatches": "128", "chunks": "8"}, "chunks=8 is more than"),
        ({"times": "f=x"}, "is not a time"),
        ({"slow": "9=2", "colour": "red"}, "'colour' is not a parameter here"),
        ({"slow": "8=2"}, "slow names rank 8, but pp=8 has the ranks 0 to 7"),
        ({"slow": "x=2"}, "x=2"),
    ],
)
def test_bad_words(words: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        payload(Ask(words))


def test_what_takes_long_is_for_a_process_of_its_own_and_sliders_do_not_lead_there() -> None:
    assert not is_large(Ask({"schedule": "zb-v", "pp": "16", "microbatches": "64"}))
    assert is_large(Ask({"schedule": "zb-v", "pp": "64", "microbatches": "128"}))
    assert is_large(Ask({"schedule": "interleaved", "pp": "16", "microbatches": "64", "chunks": "8"}))
    steps = payload(Ask({"pp": "12", "microbatches": "6"}))["steps"]
    assert max(steps["pp"]) == 32
    assert 12 * max(steps["microbatches"]) <= 2048
    assert is_large(Ask({"pp": "40", "microbatches": "2"}))
    assert 40 in payload(Ask({"pp": "40", "microbatches": "2"}))["steps"]["pp"]


def test_a_file_holds_all_of_them() -> None:
    view = answered_view("schedule", Ask({"pp": "2", "microbatches": "4", "schedule": "auto"}))
    assert view["payload"]["drawn"] is None
    assert view["parts"]["made"]["drawn"]["figures"]["schedule"] == "auto"
    assert len(view["parts"]["every"]["schedules"]) == len(FAST)


@pytest.mark.parametrize("times", ["f=0,i=0,w=0", "f=0,b=0", "f=0,i=0,w=0,b=1", "f=0:0,i=0,w=0,comm=1"])
def test_times_in_which_nothing_happens_are_refused(times: str) -> None:
    for asked in (payload, every):
        with pytest.raises(UserError, match="neither a forward nor a backward pass takes time"):
            asked(Ask({"times": times}))
    assert payload(Ask({"times": "f=0,i=1,w=0"}))["drawn"] is not None
