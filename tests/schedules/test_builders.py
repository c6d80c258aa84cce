"""Every builder: closed forms of bubble and memory, few microbatches, refusals."""

from itertools import product

import pytest
from hypothesis import given

from fivefold.schedules.check import check
from fivefold.schedules.costs import Costs, MessageLink
from fivefold.schedules.registry import CATALOGUE, build
from fivefold.schedules.schedule import Schedule, peak_live
from fivefold.schedules.simulate import simulate
from fivefold.support.errors import UserError
from tests.schedules.brute import trouble
from tests.schedules.strategies import schedules

SIZES = [(1, 1), (1, 4), (2, 1), (2, 5), (3, 2), (4, 4), (4, 8), (5, 9), (8, 16), (8, 32)]


def makespan(schedule: Schedule, f: float = 1, i: float = 1, w: float = 1, comm: float = 0) -> float:
    return simulate(schedule, Costs.even(schedule.placement, f, i, w, link=MessageLink(latency=comm))).makespan


@given(schedules())
def test_whatever_is_built_passes_every_proof_and_runs(schedule: Schedule) -> None:
    assert check(schedule) == []
    assert trouble(schedule, seeds=1) is None


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_keeps_its_promise(name: str) -> None:
    for p, m in [(p, m) for p, m in SIZES if m >= CATALOGUE[name].least * p]:
        schedule = build(name, p, m)
        peaks = [peak_live(order) for order in schedule.ranks]
        assert schedule.promise.peak is not None
        assert all(peak <= promised for peak, promised in zip(peaks, schedule.promise.peak, strict=True)), (p, m)
        assert max(peaks) == max(schedule.promise.peak) or name == "auto", (p, m)
        if schedule.promise.slots is not None:
            assert simulate(schedule, Costs.slots(schedule.placement)).makespan == schedule.promise.slots, (p, m)


# ---- bubbles -------------------------------------------------------------------------------------------------------


def test_naive_leaves_all_but_one_rank_idle() -> None:
    for p, m in SIZES:
        assert simulate(build("naive", p, m)).bubble_makespan == pytest.approx((p - 1) / p)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_have_the_textbook_bubble(name: str) -> None:
    for p, m in SIZES:
        schedule = build(name, p, m)
        assert makespan(schedule, 1, 1.25, 0.75) == pytest.approx((m + p - 1) * 3)
        assert simulate(schedule).bubble_makespan == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("name", ["interleaved", "bfs"])
def test_chunks_divide_the_bubble(name: str) -> None:
    for v, (p, m) in product((1, 2, 3, 4), ((2, 5), (4, 8), (4, 9), (8, 32))):
        assert makespan(build(name, p, m, chunks=v)) - 3 * m == pytest.approx((p - 1) * 3 / v), (p, m, v)


def test_zb_h1_fills_the_bubble_with_weight_gradients() -> None:
    for (f, i, w), (p, m) in product(((1, 1, 1), (1, 1, 0.5), (2, 1.5, 1)), ((2, 4), (4, 8), (8, 32))):
        assert makespan(build("zb-h1", p, m), f, i, w) - m * (f + i + w) == pytest.approx((p - 1) * (f + i - w))


def test_zb_h2_has_the_span_bubble_of_the_paper() -> None:
    for (f, i, w), (p, m) in product(((1, 1, 1), (1, 1, 0.5), (2, 2, 1.5)), ((2, 4), (4, 8), (8, 32))):
        schedule = build("zb-h2", p, m)
        waits = [rank.wait for rank in simulate(schedule, Costs.even(schedule.placement, f, i, w)).ranks]
        assert max(waits) == pytest.approx(max(0, (p - 1) * (f + i - 2 * w)), abs=1e-9)


def test_zb_v_leaves_no_gap_when_all_passes_take_the_same_time() -> None:
    for p, m in ((1, 1), (2, 3), (4, 7), (4, 8), (8, 15), (8, 40)):
        assert simulate(build("zb-v", p, m)).bubble_span == pytest.approx(0, abs=1e-12)


def test_v_half_and_v_min_at_eight_ranks() -> None:
    found = {name: build(name, 8, 32) for name in ("1f1b", "v-half", "v-min")}
    assert {name: makespan(one) - 3 * 32 for name, one in found.items()} == {"1f1b": 21, "v-half": 8.5, "v-min": 13.5}
    assert simulate(found["v-half"]).peak_activations == [5] * 8
    assert simulate(found["v-min"]).peak_activations == [4] * 8


def test_dualpipe_v_has_its_published_bubble() -> None:
    """(p - 1)(F&B + B - 3W) in chunk times, with F = I = 1; on the rank that idles most."""
    for (p, m), (w, fb) in product(((2, 4), (4, 8), (4, 20), (8, 32)), ((1, 3), (1, 2.5), (0.5, 2.2))):
        schedule = build("dualpipe-v", p, m)
        simulation = simulate(schedule, Costs.even(schedule.placement, 1, 1, w, fb=fb))
        idle = max(rank.wait + rank.idle for rank in simulation.ranks)
        assert idle == pytest.approx((p - 1) * (fb + (1 + w) - 3 * w) / 2), (p, m)


def test_dualpipe_v_idles_less_than_published_when_f_is_not_i() -> None:
    schedule = build("dualpipe-v", 8, 32)
    simulation = simulate(schedule, Costs.even(schedule.placement, 1, 1.2, 0.8, fb=2.6))
    assert max(rank.wait + rank.idle for rank in simulation.ranks) == pytest.approx(7.2)
    assert pytest.approx(7.7) == 7 * (2.6 + 2.0 - 3 * 0.8) / 2  # the formula


def test_zb_h2_is_slower_than_zb_h1_with_few_microbatches() -> None:
    assert (makespan(build("zb-h1", 4, 4)), makespan(build("zb-h2", 4, 4))) == (15, 16)


def test_a_synchronised_optimizer_leaves_h2_its_advantage_when_passes_differ() -> None:
    rates = {}
    for name in ("zb-h1", "zb-h2"):
        schedule = build(name, 8, 24)
        costs = Costs.even(schedule.placement, 29.718, 29.444, 19.927, link=MessageLink(latency=0.527))
        rates[name] = round(simulate(schedule, costs).bubble_makespan, 4)
    assert rates == {"zb-h1": 0.1323, "zb-h2": 0.1003}


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(1, 3), (3, 2), (4, 8), (8, 32)])
def test_peak_activations_of_the_table(p: int, m: int) -> None:
    def peaks(name: str) -> list[float]:
        return simulate(build(name, p, m)).peak_activations

    assert peaks("naive") == [1] * p
    assert peaks("gpipe") == [m] * p
    assert peaks("1f1b") == [min(m, p - rank) for rank in range(p)]
    assert peaks("zb-h1") == [min(m, p)] * p
    assert peaks("zb-h2") == [min(m, 2 * p - 1)] * p
    if m >= 2 * p:
        assert peaks("zb-v") == [p] * p
        assert peaks("dualpipe-v") == [(2 * p + 1) / 2] * p


@pytest.mark.parametrize(("p", "m", "v", "group"), [(4, 8, 2, 4), (4, 9, 2, 5), (8, 32, 4, 16), (4, 12, 3, 6)])
def test_interleaved_peak_activations(p: int, m: int, v: int, group: int) -> None:
    simulation = simulate(build("interleaved", p, m, chunks=v, group=group))
    expected = [((v - 1) * group + 2 * (p - 1 - rank) + 1) / v for rank in range(p)]
    assert simulation.peak_activations == pytest.approx([min(m, peak) for peak in expected])


# ---- few microbatches, bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CATALOGUE if not CATALOGUE[name].least])
def test_fewer_microbatches_than_ranks_work(name: str) -> None:
    for m in (1, 2, 3, 7):
        schedule = build(name, 8, m)
        assert check(schedule) == []
        assert trouble(schedule) is None


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("zbh1", {"p": 4, "m": 8}, "unknown schedule 'zbh1'; did you mean 'zb-h1'"),
        ("1f1b", {"p": 0, "m": 8}, "the number of ranks is 0"),
        ("1f1b", {"p": 4, "m": 0}, "the number of microbatches is 0"),
        ("dualpipe-v", {"p": 4, "m": 7}, "at least 2p=8 microbatches"),
        ("interleaved", {"p": 4, "m": 3}, "at least p=4 microbatches"),
        ("1f1b", {"p": 4, "m": 8, "chunks": 2}, "1f1b has 1 chunk per rank, not 2"),
        ("interleaved", {"p": 4, "m": 8, "chunks": 0}, "chunks is 0"),
        ("zb-v", {"p": 4, "m": 8, "group": 4}, "no group size"),
        ("zb-v", {"p": 4, "m": 8, "memory": 4}, "no memory limit"),
        ("auto", {"p": 4, "m": 8, "memory": 0}, "room for 0 activations"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(name: str, arguments: dict[str, int], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build(name, **arguments)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_record_says_what_its_builder_does(name: str) -> None:
    record, counts = CATALOGUE[name], (1, 2, 3) if CATALOGUE[name].any_chunks else (CATALOGUE[name].chunks,)
    for (p, m), chunks in product(((1, 2), (2, 4), (4, 8), (4, 9), (3, 12)), counts):
        schedule = build(name, p, m, chunks=chunks)
        assert schedule.name == record.name
        assert schedule.placement == record.placement(p, chunks)
        assert schedule.placement.chunks == chunks
        assert schedule.splits == record.splits or (record.uses_stage_times and not schedule.splits)
        held = max(sum(held.values()) for held in schedule.in_flight)
        assert held == max(map(peak_live, schedule.ranks))
        # What closed forms take for the peak is near enough to rank by.
        assert held / chunks <= min(m, record.live(p, m, chunks)) * 1.2 + 1


def test_records_are_what_layouts_planner_and_verifier_have_always_had() -> None:
    """Of these twelve; one more schedule needs no change here."""
    chunks = {
        "naive": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "bfs": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "v-half": 2,
        "v-min": 2, "dualpipe-v": 2, "auto": 1,
    }  # fmt: skip
    records = [record for name, record in CATALOGUE.items() if name in chunks]
    assert {record.name: record.chunks for record in records} == chunks
    assert [record.name for record in records if record.any_chunks] == ["interleaved", "bfs"]
    planned = [(record.name, chunks) for record in records for chunks in record.planned]
    assert planned == [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8), ("zb-h1", 1),
                       ("zb-v", 2), ("v-half", 2), ("dualpipe-v", 2)]  # fmt: skip
    whole = ["naive", "gpipe", "1f1b", "interleaved", "bfs"]
    assert [record.name for record in records if not record.splits] == whole
